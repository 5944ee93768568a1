"""What of a model is trained: parameters frozen by name, and low-rank adapters beside frozen products (Hu et al., 2021, arXiv:2106.09685).

Both rewrite the forward graph before its backward is derived; a frozen parameter has no gradient and no optimizer state, and what only frozen parameters lie
below has no cotangent. All else (placements, parity, memory) follows.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ir.errors import InputError
from ir.graph import Builder, Graph, Node
from planner.frontends.transformer import salt

TARGETS: dict[str, str] = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
"""What PEFT's users call the products of a Llama, and what they are called here."""

KEYS = {
    "r": "rank", "rank": "rank", "alpha": "alpha", "lora_alpha": "alpha", "dropout": "dropout", "lora_dropout": "dropout", "targets": "targets",
    "target_modules": "targets", "use_rslora": "stabilized",
}  # fmt: skip
"""Keys of `--lora`, PEFT's among them."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Beside every product of `targets` (the last part of a node's name; `all-linear`: all but the head) a product of two thin matrices of `rank`.

    The sum's second part is scaled by alpha / rank, or alpha / sqrt(rank) where `stabilized`; `dropout` acts on what enters the adapter. Everything else is
    frozen. Prints as it is given on the command line.

    >>> Lora.parse("r=4,target_modules=q_proj,v_proj")
    rank=4,alpha=8,targets=q+v
    """

    rank: int = 8
    alpha: float = 8.0
    targets: tuple[str, ...] = ("q", "v")
    dropout: float = 0.0
    stabilized: bool = False

    def __repr__(self) -> str:
        more = (f",dropout={self.dropout:g}" if self.dropout else "") + (",use_rslora=true" if self.stabilized else "")
        return f"rank={self.rank},alpha={self.alpha:g},targets={'+'.join(self.targets)}{more}"

    @property
    def factor(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.stabilized else self.rank)

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Reads `rank=16,alpha=32,targets=q,v`; a word without = belongs to the list before it. Raises InputError."""
        given: dict[str, list[str]] = {}
        last = ""
        for part in filter(None, (p.strip() for p in re.split(r"[,+]", text))):
            key, equals, value = (p.strip() for p in part.partition("="))
            if equals and key not in KEYS:
                near = difflib.get_close_matches(key, KEYS, n=1)
                raise InputError(f"--lora {text}: `{key}` is no key{f'; did you mean {near[0]}?' if near else ''}; keys are {', '.join(KEYS)}")
            last = KEYS[key] if equals else last
            if last != "targets" and (not equals or last in given):
                raise InputError(f"--lora {text}: `{part}` is no key=value, or given twice; for example rank=16,alpha=32,targets=q,v")
            given.setdefault(last, []).append(value if equals else part)
        return cls(
            _count(text, given.get("rank", ["8"])[0]), _number(text, given.get("alpha", ["8"])[0]),
            tuple(dict.fromkeys(TARGETS.get(t, t) for t in given.get("targets", ["q", "v"]) if t)), _share(text, given.get("dropout", ["0"])[0]),
            _flag(text, given.get("stabilized", ["false"])[0]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tuning:
    """`freeze`: patterns of parameters' names. With neither, everything is trained. Prints as it stands behind a model's name.

    >>> Tuning.split("gpt2[num_layers=2]+freeze(wte*,wpe*)")
    ('gpt2[num_layers=2]', +freeze(wte*,wpe*))
    """

    freeze: tuple[str, ...] = ()
    lora: Lora | None = None

    def __repr__(self) -> str:
        adapters = f"+lora({self.lora!r})" if self.lora else ""
        return adapters + (f"+freeze({','.join(self.freeze)})" if self.freeze else "")

    def __bool__(self) -> bool:
        return bool(self.freeze or self.lora)

    @classmethod
    def split(cls, text: str) -> tuple[str, Tuning]:
        """A model's name, and what is said behind it of its training."""
        match = _BEHIND.fullmatch(text)
        if match is None:
            return text, cls()
        frozen = tuple(filter(None, (p.strip() for p in (match["freeze"] or "").split(","))))
        return match["name"], cls(frozen, Lora.parse(match["lora"]) if match["lora"] is not None else None)

    def apply(self, graph: Graph) -> Graph:
        """The graph that is trained. Raises InputError where a pattern or a target names nothing, or nothing is left to train."""
        tuned = with_adapters(graph, self.lora) if self.lora else graph
        return frozen(tuned, self.freeze) if self.freeze else tuned


EVERYTHING = Tuning()
"""All parameters are trained."""

_BEHIND = re.compile(r"(?P<name>.*?)(?:\+lora\((?P<lora>[^()]*)\))?(?:\+freeze\((?P<freeze>[^()]*)\))?", re.S)


def frozen(graph: Graph, patterns: Sequence[str]) -> Graph:
    """The same graph with the parameters frozen whose names match one of the patterns (`*`, `?`, `[...]`)."""
    names = [p.name for p in graph.params]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3)
            raise InputError(f"--freeze {pattern}: no parameter of `{graph.name}` is called like that; there are {', '.join(near or names[:3])}, ...")
    hit = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    if all(p.name in hit or p.frozen for p in graph.params):
        raise InputError(f"--freeze {','.join(patterns)}: nothing of `{graph.name}` is left to train")
    return replace(graph, tensors={name: replace(t, frozen=t.frozen or name in hit) for name, t in graph.tensors.items()})


def with_adapters(graph: Graph, lora: Lora) -> Graph:
    """The same graph with every parameter frozen, and trained adapters of their own beside the products that `lora` names."""
    targets = [n for n in graph.nodes if _is_target(n, lora)]
    products = sorted({n.name.rpartition(".")[2] for n in graph.nodes if n.op == "linear"})
    missing = [t for t in lora.targets if t != "all-linear" and not any(n.name.rpartition(".")[2] == t for n in targets)]
    if missing or not targets:
        raise InputError(f"--lora targets={'+'.join(lora.targets)}: `{graph.name}` has no product called {', '.join(missing)}; it has {', '.join(products)}")
    smallest = min(min(graph.tensors[n.inputs[1]].shape) for n in targets)
    if lora.rank > smallest:
        raise InputError(f"--lora rank={lora.rank}: the smallest matrix beside which an adapter would stand has {smallest} rows or columns; give less")
    build = Builder(graph.name)
    build.tensors.update({t.name: replace(t, frozen=t.role == "param") for t in graph.tensors.values() if t.role != "value"})
    named = {n.name for n in targets}
    for node in graph.nodes:
        if node.name in named:
            _write_adapted(build, node, lora)
        else:
            _write(build, node)
    return build.graph(graph.outputs)


def _is_target(node: Node, lora: Lora) -> bool:
    return node.op == "linear" and ("all-linear" in lora.targets or node.name.rpartition(".")[2] in lora.targets)


def _write(build: Builder, node: Node, name: str = "", outputs: Sequence[str] = ()) -> None:
    build.node(node.op, node.inputs, name=name or node.name, outputs=outputs or node.outputs, attrs=node.attrs, layer=node.layer, phase=node.phase)


def _write_adapted(build: Builder, node: Node, lora: Lora) -> None:
    """`y = x w` becomes `y = x w + scale(x a b)`; `a` starts as PyTorch starts a linear layer, `b` as zeros, so that training starts at the model itself."""
    x, weight = node.inputs
    k, n = build.tensors[weight].shape
    at, dtype = f"{node.name}.lora", build.tensors[weight].dtype
    down = build.tensor(f"{at}.a.weight", (k, lora.rank), dtype, "param", {"init": "uniform", "bound": 1.0 / math.sqrt(k)})
    up = build.tensor(f"{at}.b.weight", (lora.rank, n), dtype, "param", {"init": "zeros"})
    _write(build, node, f"{node.name}.base", (f"{node.name}.base",))
    if lora.dropout:
        (x,) = build.node("dropout", (x,), name=f"{at}.drop", attrs={"p": lora.dropout, "salt": salt(f"{at}.drop")}, layer=node.layer)
    (thin,) = build.node("linear", (x, down), name=f"{at}.a", layer=node.layer)
    (wide,) = build.node("linear", (thin, up), name=f"{at}.b", layer=node.layer)
    (scaled,) = build.node("scale", (wide,), name=f"{at}.scaled", attrs={"factor": lora.factor}, layer=node.layer)
    build.node("add", (f"{node.name}.base", scaled), name=node.name, outputs=node.outputs, layer=node.layer)


def _count(text: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise InputError(f"--lora {text}: rank is {value}; give a whole number of 1 or more")
    return int(value)


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise InputError(f"--lora {text}: alpha is {value}; give a number above 0")
    return number


def _share(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 <= number < 1.0:
        raise InputError(f"--lora {text}: dropout is {value}; give a number from 0 up to, but not including, 1")
    return number


def _flag(text: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise InputError(f"--lora {text}: use_rslora is {value}; give true or false")
    return value.lower() == "true"


__all__ = ["EVERYTHING", "Lora", "Tuning", "frozen", "with_adapters"]
