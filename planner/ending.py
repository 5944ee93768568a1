"""The end of a step on each site: the loss handed out, gradients reduced to where their states lie, their norm, and every parameter's update.

What a microbatch adds up has been written before (`planner.place`); what a parameter's update consists of is told in `planner.optimizers`. Whoever wants
gradients reduced or parameters updated otherwise changes it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ir.graph import Tensor
from ir.op import ALL_B
from ir.sbp import B, NdSbp
from planner.autodiff import Joint, cotangent
from planner.optimizers import is_hidden, update_of, with_defaults
from planner.owners import ALL, Bundle, Call, Operand, bundles, calls
from planner.pieces import whole_name
from planner.sites import Sites, identity_rules, sum_rule

Accumulators = Mapping[tuple[int, str], str]
"""By (site, gradient of one use of a parameter) the value that all microbatches have added to."""


def end_step(joint: Joint, sites: Sites, accumulators: Accumulators) -> None:
    """Writes the tasks of part `end` of every site; all reductions come before any update, since updates wait for the norm over all sites."""
    ends = [_End(joint, sites, accumulators, stage) for stage in sites.firsts]
    for end in ends:
        end.losses()
    grads = [end.gradients() for end in ends]
    for end, mine in zip(ends, grads, strict=True):
        end.update(mine)


class _End:
    """That of one site, for which its first stage stands."""

    def __init__(self, joint: Joint, sites: Sites, accumulators: Accumulators, stage: int) -> None:
        self.joint, self.graph, self.plan = joint, joint.graph, sites.plan
        self.sites, self.accumulators, self.stage = sites, accumulators, stage
        self.values = sites.at(stage).values
        self.whole = (B,) * len(self.plan.axes)
        self.joins = "comm.copies" if self.plan.copies > 1 else "comm.tied"

    def _value(self, tensor: Tensor, nd: NdSbp, memory: str = "buffer", **more: Any) -> str:
        return self.sites.value(self.stage, tensor, nd, "end", clock="step", memory=memory, **more)

    def _task(self, kind: str, op: str, name: str, **more: Any) -> None:
        self.sites.task(self.stage, "end", kind, op, name, phase="U", **more)

    def _box(self, have: str, nd: NdSbp, memory: str = "buffer") -> str:
        return self.sites.box(self.stage, self.values[have].tensor, have, nd, "end", None, clock="step", memory=memory)

    # ---- the loss ------------------------------------------------------------------------------------------------------------------------------------

    def losses(self) -> None:
        """Once a step the loss is summed over the mesh and over the copies of the last stage, and handed out."""
        like = self.graph.producer(self.graph.outputs[0])
        for t in dict.fromkeys(map(whole_name, self.graph.outputs)):
            found = [v.name for v in self.values.values() if v.tensor.name == t and v.clock == "step"]
            for name in found[:1]:
                total = self._over_copies(self._box(name, self.whole))
                self._task("store", t, f"{t}.store", reads=(total,), layer=like.layer if like else 0)

    def _over_copies(self, have: str) -> str:
        """The sum of an output over the copies of the pipeline, each of which has run a part of the batch."""
        like = self.graph.producer(self.graph.outputs[0])
        if self.plan.copies == 1 or like is None:
            return have
        tensor = self.values[have].tensor
        name = self._value(tensor, self.values[have].nd)
        peers = tuple(self.plan.stage_of(like.layer, copy) for copy in range(self.plan.copies))
        self._task("join", "all_reduce", f"{tensor.name}.join", reads=(have,), writes=(name,), peers=peers, queue=self.joins)
        return name

    # ---- gradients -----------------------------------------------------------------------------------------------------------------------------------

    def gradients(self) -> dict[str, str]:
        """For each parameter of the site the value of its whole gradient at its state's placement, in the order in which the backward completes them."""
        final: dict[str, str] = {}
        made = {t: i for i, n in enumerate(self.graph.nodes) for t in n.outputs}
        site_of = self.sites.site_of
        for p in sorted(self.graph.params, key=lambda p: max((made[c] for c in self.joint.grads.get(p.name, ())), default=-1)):
            users = sorted(self.sites.holders[p.name])
            if site_of[self.stage] not in [site_of[i] for i in users]:
                continue
            uses = dict.fromkeys(map(whole_name, self.joint.grads.get(p.name, ())))
            found = [acc for use in uses if (acc := self.accumulators.get((site_of[self.stage], use))) is not None]
            parts = [self._box(acc, self.plan.params[p.name].state, "gradient") for acc in found]
            if parts:
                final[p.name] = self._sum(p, parts, users)
        return final

    def _sum(self, spec: Tensor, parts: Sequence[str], users: Sequence[int]) -> str:
        """Adds the contributions, of this site and of the others that hold the parameter, into `d.PARAM`."""
        state = self.plan.params[spec.name].state
        whole = replace(spec, name=cotangent(spec.name), dtype=self.sites.state_dtype)
        total = parts[0]
        last = len(parts) - 1
        for k, part in enumerate(parts[1:], 1):
            name = self._value(whole if k == last and len(users) == 1 else replace(whole, name=f"{whole.name}@{k}"), state)
            self._task("compute", "add", f"{name}.add", reads=(total, part), writes=(name,), rules=tuple(map(sum_rule, state)), origin=spec.name)
            total = name
        if len(users) > 1:
            name = self._value(whole, state, "gradient")
            self._task("join", "all_reduce", f"{name}.tie", reads=(total,), writes=(name,), peers=tuple(users), queue=self.joins, origin=spec.name)
            total = name
        self.values[total] = replace(self.values[total], tensor=whole, memory="gradient")
        return total

    def _norm2(self, grads: Mapping[str, str], max_norm: float) -> str:
        """The sum of squares of all gradients, each counted once; a constant where nothing is clipped."""
        scalar, alike = Tensor("norm2", (), self.sites.state_dtype), (ALL_B,) * len(self.whole)

        def fresh(name: str) -> str:
            return self._value(replace(scalar, name=name), self.whole)

        total = ""
        for param, grad in grads.items() if max_norm > 0 else ():
            square = fresh(f"norm2.{param}")
            rules, attrs = identity_rules(self.plan.params[param].state), {"elsewhere": self.sites.is_counted_elsewhere(self.stage, param)}
            self._task("compute", "sum_squares", f"norm2.{param}", reads=(grad,), writes=(square,), rules=rules, attrs=attrs, origin=param)
            if total:
                added = fresh(f"norm2.{param}.sum")
                self._task("compute", "add", f"norm2.{param}.add", reads=(total, square), writes=(added,), rules=alike)
                square = added
            total = square
        if not total:
            total = fresh("norm2.local")
            self._task("compute", "fill", "norm2.fill", writes=(total,), rules=alike, attrs={"value": 0.0})
        if max_norm <= 0 or self.plan.num_ranks == 1:
            return total
        name = fresh("norm2")
        self._task("join", "all_reduce", "norm2.join", reads=(total,), writes=(name,), everyone=True, queue="comm.world")
        return name

    # ---- updates -------------------------------------------------------------------------------------------------------------------------------------

    def update(self, grads: Mapping[str, str]) -> None:
        """The optimizer: the global norm of the gradient where it is clipped, then each parameter in place."""
        optimizer = with_defaults(self.plan.optimizer)
        norm2 = self._norm2(grads, float(optimizer["max_norm"]))
        updates = [(p, update_of(optimizer, self.graph.tensors[p], is_hidden(self.graph, p)), self.plan.params[p].state) for p in grads]
        # Stages of a site are bundled apart, so that what a stage costs is told by itself.
        stages = [self.plan.stage_of(self.graph.consumers(p)[0][0].layer) for p in grads]
        together = bundles(updates, stages, self.plan.mesh_shape)
        values = [self._found(b, grads, norm2) for b in together]
        steps = [calls(b) for b in together]
        # Step k of one bundle comes just after step k - 1 of the next: what is re-sharded between the two has that long.
        longest = max(map(len, steps), default=0)
        for when in range(len(together) + longest):
            for k in reversed(range(longest)):
                if 0 <= when - k < len(together) and k < len(steps[when - k]):
                    for call in steps[when - k][k]:
                        self._call(together[when - k], call, values[when - k])

    def _found(self, b: Bundle, grads: Mapping[str, str], norm2: str) -> dict[Operand, str]:
        """The values that operators find under their names: gradient, norm, weights and states of every member."""
        found: dict[Operand, str] = {}
        for i, param in enumerate(b.members):
            weights = self.sites.made[self.stage, f"{param}@master" if self.sites.wide else param, b.place, "begin"]
            found |= {("g", i): grads[param], ("norm2", i): norm2, ("w", i): weights}
            kept: dict[str, Any] = {"initial": True, "counted_elsewhere": self.values[weights].counted_elsewhere}
            for t, nd in zip(b.update.states, b.update.state_places(b.place), strict=True):
                found[t.name, i] = self._value(replace(t, name=f"{param}@{t.name}"), nd, "optimizer", **kept)
        return found

    def _call(self, b: Bundle, call: Call, values: dict[Operand, str]) -> None:
        """Writes an operator's task; what earlier ones have given is brought to where this one reads it."""
        reads = tuple(self._box(values[operand], nd) for operand, nd in call.reads)
        for (operand, nd), tensor in zip(call.writes, call.made, strict=True):
            name = f"{b.members[0]}@{tensor.name}*{b.slots}" if operand[1] == ALL else f"{b.members[operand[1]]}@{tensor.name}"
            values[operand] = self._value(replace(tensor, name=name), nd, share=call.share)
        owner = b.members[max(call.member, 0)]
        self._task(
            "compute", call.op.name, f"{owner}.{call.op.name}", reads=reads, writes=tuple(values[operand] for operand, _ in call.writes),
            updates=tuple(values[operand] for operand in call.updates), rules=call.rules, attrs=call.attrs, origin=owner,
        )  # fmt: skip


__all__ = ["end_step"]
