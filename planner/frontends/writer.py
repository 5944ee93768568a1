"""Writes nodes of a graph: what every part of a model is made of, and the parameters that go with it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ir.graph import Builder
from planner.frontends.config import ModelConfig, Norm


@dataclass(frozen=True, slots=True)
class Param:
    """The shape of a parameter and how it starts."""

    shape: tuple[int, ...]
    init: Mapping[str, Any]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


Params = dict[str, Param]
"""Parameters by name, in the order in which a graph lists them."""

ZEROS: Mapping[str, Any] = {"init": "zeros"}
ONES: Mapping[str, Any] = {"init": "ones"}


def normal(std: float) -> dict[str, Any]:
    return {"init": "normal", "std": std}


def linear_params(name: str, k: int, n: int, bias: bool, std: float) -> Params:
    out = {f"{name}.weight": Param((k, n), normal(std))}
    return out | {f"{name}.bias": Param((n,), ZEROS)} if bias else out


def norm_params(norm: Norm, name: str, width: int) -> Params:
    out = {f"{name}.weight": Param((width,), ONES)}
    return out | {f"{name}.bias": Param((width,), ZEROS)} if norm.kind == "layer" else out


def salt(node: str) -> int:
    """An integer of its own for each node that draws random numbers: 31 bits of SHA-256 of its name, the same in every run."""
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:4], "big") >> 1


class Writer:
    """Writes one graph, layer after layer; every method adds the nodes of one thing and returns the tensor that the next one reads."""

    def __init__(self, c: ModelConfig, b: Builder, batch: int, seq: int) -> None:
        self.c, self.b, self.batch, self.seq = c, b, batch, seq
        self.layer = 0
        self.load: tuple[str, ...] = ()

    def node(self, op: str, name: str, *inputs: str, **attrs: Any) -> str:
        """Adds a node and returns its first output, which is called like it."""
        return self.nodes(op, name, *inputs, **attrs)[0]

    def nodes(self, op: str, name: str, *inputs: str, **attrs: Any) -> tuple[str, ...]:
        """Adds a node and returns all its outputs."""
        return self.b.node(op, inputs, name=name, attrs=attrs, layer=self.layer)

    def linear(self, name: str, x: str, bias: bool) -> str:
        y = self.node("linear", name, x, f"{name}.weight")
        return self.node("bias", f"{name}.add_bias", y, f"{name}.bias") if bias else y

    def norm(self, norm: Norm, name: str, x: str) -> str:
        if norm.kind == "layer":
            return self.node("layer_norm", name, x, f"{name}.weight", f"{name}.bias", eps=norm.eps)
        return self.node("rms_norm", name, x, f"{name}.weight", eps=norm.eps)

    def dropout(self, name: str, x: str, p: float) -> str:
        return self.node("dropout", name, x, p=p, salt=salt(name)) if p else x

    def activation(self, name: str, kind: str, x: str) -> str:
        if kind.startswith("gelu"):
            return self.node("gelu", name, x, approximate="tanh" if kind == "gelu_tanh" else "none")
        return self.node(kind, name, x)
