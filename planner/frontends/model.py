"""A model as the planner meets it: a name, the facts of its config, and the forward graph for any microbatch.

>>> from planner.frontends import load
>>> model = load("gpt2")
>>> model
Model(gpt2: 124 M parameters, 12 layers)
>>> model.num_params, model.graph(batch=2, seq=16, dtype="fp32").outputs
(124439808, ('loss',))
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ir import units
from ir.errors import InputError
from ir.graph import Graph
from planner.frontends import transformer
from planner.frontends.config import ModelConfig, Rope
from planner.frontends.tuning import EVERYTHING, Tuning


@dataclass(frozen=True, slots=True, repr=False)
class Model:
    """`name` is what people call it, `source` where its figures come from (a URL, a paper, a path), `reference` what `load` takes to give it again.

    None of the three changes the fingerprint.
    """

    name: str
    config: ModelConfig
    source: str = ""
    reference: str = ""
    tuning: Tuning = EVERYTHING

    def __repr__(self) -> str:
        return f"Model({self.name}: {units.count(self.num_params)} parameters, {self.num_layers} layers)"

    def tuned(self, tuning: Tuning) -> Model:
        """The same model of which only a part is trained. Raises InputError where that names what the model does not have."""
        if self.tuning:
            raise InputError(f"`{self.name}` says already what is trained; give it once")
        names = (f"{name}{tuning!r}" if name else "" for name in (self.name, self.reference))
        made = Model(next(names), self.config, self.source, next(names), tuning)
        made.graph(1, made._shortest_seq)
        return made

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def num_layers(self) -> int:
        """Blocks, an encoder's included. The chain that a pipeline may cut is two longer: the embedding before them and the head after them."""
        return self.config.num_layers

    @property
    def num_params(self) -> int:
        """Elements of all parameters, frozen ones and adapters included; a tied table counts once."""
        return self.graph(1, self._shortest_seq).num_params if self.tuning.lora else transformer.num_params(self.config)

    @property
    def _shortest_seq(self) -> int:
        return self.max_seq if self.config.image else 1

    @property
    def max_seq(self) -> int:
        """The longest sequence whose graph can be built as the config means it; of images the only one."""
        return self.config.max_positions

    @property
    def fingerprint(self) -> str:
        """Changes when anything that a plan depends on changes."""
        if not self.tuning:
            return self.config.fingerprint
        return hashlib.sha256(f"{self.config.fingerprint} {self.tuning!r}".encode()).hexdigest()[: len(self.config.fingerprint)]

    @property
    def summary(self) -> Mapping[str, Any]:
        """The facts that `headrace models` shows, as JSON holds them."""
        c = self.config
        a, e = c.attention, c.experts
        experts = {"experts": e.num_experts, "top_k": e.top_k, "capacity": e.capacity} if e else {}
        return {
            "name": self.name, "family": self.family, "num_params": self.num_params, "layers": c.num_layers, "hidden": c.hidden, "heads": a.num_heads,
            "kv_heads": a.num_kv_heads, "head_dim": a.head_dim, "mlp_hidden": c.mlp.hidden, "vocab": c.vocab, "max_positions": c.max_positions,
            "max_seq": self.max_seq, "tied": c.tied, **experts, "source": self.source, "reference": self.reference, "fingerprint": self.fingerprint,
        }  # fmt: skip

    def graph(self, batch: int, seq: int, dtype: str = "float32") -> Graph:
        """The forward graph of one microbatch of `batch` samples of `seq` tokens; see `planner.frontends.transformer`."""
        return self.tuning.apply(transformer.build(self.config, self.name, batch, seq, dtype))


__all__ = ["Model", "ModelConfig", "Rope"]
