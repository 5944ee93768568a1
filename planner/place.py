"""From one step's graph and a plan to tasks: what every rank of a stage does, boxing and hops written out, in order.

Here are the passes of a microbatch and what begins a step; `planner.sites` says what tasks and values are, `planner.ending` writes the end of a step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from ir.boxing import crossing_ends
from ir.errors import PlanError
from ir.graph import Node, Tensor
from ir.op import ALL_B, Op, Rule, nd_placements
from ir.plan import Plan
from ir.sbp import B, NdSbp
from planner.autodiff import Joint
from planner.ending import end_step
from planner.pieces import mark_of, start_of, whole_name
from planner.sites import Sites, SiteTasks, identity_rules, sum_rule

SHIFT = "shift"
"""The operator that a split sequence makes a message of."""

BLOCKS = ".nodes"
"""Behind the queue of messages from one block of a ring to the next, which must not hold back those inside."""

AFTER = "after"
"""The attribute of a node that names tensors which must be there before it runs though it does not read them."""


def place(joint: Joint, plan: Plan) -> tuple[SiteTasks, ...]:
    """The tasks of every site. Raises PlanError when the plan misses a node, tensor or parameter of the graph."""
    return _Placer(joint, plan).run()


class _Placer:
    def __init__(self, joint: Joint, plan: Plan) -> None:
        self.joint, self.plan, self.graph = joint, plan, joint.graph
        self.sites = Sites(plan, (p.name for p in self.graph.params))
        self.hubbed: dict[tuple[int, int, str], str] = {}
        self.unboxed: dict[tuple[int, int, str], str] = {}
        self.accumulators: dict[tuple[int, str], str] = {}
        self.reboxed = frozenset(plan.reboxed)
        self.to_add: dict[int, list[tuple[Node, str, str]]] = {}
        self.last_of_layer: dict[tuple[int, str], dict[int, str]] = {}
        self.uses: dict[tuple[int, str], list[int]] = {}
        self.boxed: set[str] = set()
        holders = self.sites.holders
        for copy, n in product(range(plan.copies), self.graph.nodes):
            at = plan.stage_of(n.layer, copy)
            for t in n.inputs:
                if n.phase in ("F", "R") or t.startswith("d."):
                    self.boxed.add(t)
                self.sites.add(self.uses.setdefault((copy, t), []), at)
                if t in holders:
                    self.sites.add(holders[t], at)

    def run(self) -> tuple[SiteTasks, ...]:
        for p in self.graph.params:
            for i in sorted(self.sites.holders[p.name]):
                self._begin_param(i, p)
        for copy, node in product(range(self.plan.copies), self.graph.nodes):
            self._node(node, copy)
        for stage in range(len(self.plan.stages)):
            self._add_up(stage, -2)
        end_step(self.joint, self.sites, self.accumulators)
        return self.sites.all

    def _home(self, stage: int, tensor: str) -> tuple[int, int, str]:
        """Where a tensor of a microbatch lives: the stages of a site share it, but those of two copies run other microbatches."""
        return self.sites.site_of[stage], self.plan.copy_of(stage), tensor

    def _hub(self, tensor: str) -> NdSbp:
        """Where the tensor exists once: a forward value at its hub's value placement, a cotangent where it is summed."""
        behind = self.joint.stands_for.get(tensor, tensor)
        is_cotangent = tensor.startswith("d.")
        behind = behind.removeprefix("d.") if is_cotangent else behind
        if behind in self.graph.outputs:
            return (B,) * len(self.plan.axes)
        hub = self.plan.hubs.get(behind)
        if hub is None:
            raise PlanError(f"the plan says nothing about tensor `{behind}`; it was made for another model: plan again")
        return hub.cotangent if is_cotangent else hub.value

    # ---- nodes -------------------------------------------------------------------------------------------------------------------------------------

    def _rules(self, node: Node, op: Op) -> tuple[Rule, ...]:
        if node.name in self.plan.rules:
            return self.plan.rules[node.name]
        if node.op == "add" and node.phase == "I":
            return tuple(sum_rule(sbp) for sbp in self._hub(node.outputs[0]))
        if node.op == "fill":
            return (ALL_B,) * len(self.plan.axes)
        forward = self.graph.node[node.origin] if node.origin else node
        rules = self.plan.rules.get(forward.name)
        if rules is None:
            raise PlanError(f"the plan says nothing about node `{forward.name}`; it was made for another model: plan again")
        if node.phase in ("F", "R"):
            return rules
        forward_op = self.graph.op(forward)
        return tuple(forward_op.grad_rule(rule, op) for rule in rules)

    def _add_up(self, stage: int, layer: int) -> None:
        """Adds the boxed weight gradients of the layers that lie more than one above `layer` to what other microbatches have left."""
        rest = []
        for node, boxed, accumulator in self.to_add.get(stage, ()):
            if node.layer <= layer + 1:
                rest.append((node, boxed, accumulator))
                continue
            rules = identity_rules(self.sites.at(stage).values[boxed].nd)
            self.sites.task(
                stage, "W", "compute", "cast", f"{accumulator}.add{mark_of(node.name)}", reads=(boxed,), writes=(accumulator,), rules=rules,
                attrs={"dtype": self.sites.state_dtype}, origin=node.origin, phase="W", layer=node.layer,
            )  # fmt: skip
        self.to_add[stage] = rest

    def _node(self, node: Node, copy: int) -> None:
        stage = self.plan.stage_of(node.layer, copy)
        if node.phase not in ("F", "R"):
            self._add_up(stage, node.layer)
        part = node.phase if node.phase in ("F", "W") else "I"
        op = self.graph.op(node)
        rules = self._rules(node, op)
        ins, outs = nd_placements(rules, op)
        reads = tuple(self._read(stage, part, node, t, nd) for t, nd in zip(node.inputs, ins, strict=True))
        writes = []
        for t, nd in zip(node.outputs, outs, strict=True):
            tensor = self.graph.tensors[t]
            if t in self.graph.outputs:
                writes.append(self._output(stage, t, nd, part))
            elif self._adds_up(node, t, nd):
                writes.append(self._accumulator(stage, t, nd))
            else:
                writes.append(self.sites.value(stage, tensor, nd, part))
        attrs = {k: v for k, v in node.attrs.items() if k != AFTER}
        more: dict[str, Any] = {"attrs": attrs, "first": start_of(self.plan, stage)}
        if node.op == SHIFT:  # a message from each rank to the next one along the axis that splits what is shifted
            axis = rules.index(Rule("split", "s"))
            of_blocks = attrs.get("of_blocks", False)
            more = {"axes": (axis,), "queue": f"comm.{self.plan.axes[axis]}{BLOCKS if of_blocks else ''}", "attrs": attrs}
        self.sites.task(
            stage, part, "shift" if node.op == SHIFT else "compute", node.op, node.name, reads=reads, writes=tuple(writes), waits=self._after(stage, node),
            rules=rules, origin=node.origin or node.name, phase=node.phase, layer=node.layer, **more,
        )  # fmt: skip
        passing = [name for name in writes if self.sites.at(stage).values[name].clock == "microbatch"]
        if passing:
            self.last_of_layer.setdefault((stage, part), {})[node.layer] = passing[0]
        for t, name in zip(node.outputs, writes, strict=True):
            if t not in self.graph.outputs and self.sites.at(stage).values[name].clock == "microbatch":
                self._publish(stage, part, node, t, name)

    def _after(self, stage: int, node: Node) -> tuple[str, ...]:
        """The values of the tensors that a node waits for."""
        keys = [self._home(stage, t) for t in node.attrs.get(AFTER, ())]
        return tuple(self.hubbed.get(key) or self.unboxed[key] for key in keys)

    def _output(self, stage: int, tensor: str, nd: NdSbp, part: str) -> str:
        """Where a part of the loss is added up over the step: the pieces of a sequence add to one value."""
        name = whole_name(tensor)
        return name if name in self.sites.at(stage).values else self.sites.value(stage, replace(self.graph.tensors[tensor], name=name), nd, part, clock="step")

    def _publish(self, stage: int, part: str, node: Node, tensor: str, name: str) -> None:
        """Brings a fresh value to its hub, to the stages that use it, or into the gradient that it adds to."""
        spec = self.graph.tensors[tensor]
        param = self._param_of(tensor)
        if param is not None:
            # A weight gradient: boxed each microbatch. It is added two layers later, when the boxing is done, and no kernel waits for it.
            want = self.plan.params[param].grad
            boxed = self.sites.box(stage, spec, name, want, part, node)
            self.to_add.setdefault(stage, []).append((node, boxed, self._accumulator(stage, tensor, want)))
            return
        if tensor not in self.boxed:
            self.unboxed[self._home(stage, tensor)] = name
            return
        hub = self.sites.box(stage, spec, name, self._hub(tensor), part, node)
        self.hubbed[self._home(stage, tensor)] = hub
        for other in self.uses[self.plan.copy_of(stage), tensor]:
            if self.sites.site_of[other] != self.sites.site_of[stage]:
                self._hop(stage, other, part, node, spec, hub)

    def _hop(self, stage: int, other: int, part: str, node: Node, spec: Tensor, have: str) -> None:
        """Sends a value to another stage, every byte once, and brings it to its hub there."""
        src, dst = self.sites.at(stage).mesh, self.sites.at(other).mesh
        hub = self.sites.at(stage).values[have].nd
        leaving, entering = crossing_ends(hub, src, hub, dst, spec.shape)
        leave = self.sites.box(stage, spec, have, leaving, part, node)
        enter = self.sites.value(other, spec, entering, part, memory="buffer")
        direction = "f" if part == "F" else "b"
        name = f"{spec.name}.{stage}to{other}.{part}"
        about: dict[str, Any] = {"origin": node.origin or node.name, "phase": node.phase, "layer": node.layer}
        self.sites.task(stage, part, "send", "send", f"{name}.send", reads=(leave,), peers=(stage, other), queue=f"send.{direction}", **about)
        self.sites.task(other, part, "recv", "recv", f"{name}.recv", writes=(enter,), peers=(stage, other), queue=f"recv.{direction}", **about)
        self.hubbed[self._home(other, spec.name)] = self.sites.box(other, spec, enter, hub, part, node)

    def _read(self, stage: int, part: str, node: Node, tensor: str, nd: NdSbp) -> str:
        """The value of `tensor` in placement `nd` that a node reads in this part of the step."""
        spec = self.graph.tensors[tensor]
        if spec.role == "input":
            return self.sites.made.get((stage, tensor, nd, "F")) or self._load(stage, spec, nd)
        if spec.role == "param":
            place = self.plan.params[tensor].held
            held = self.sites.made[self.sites.key(stage, "begin"), tensor, place, "begin"]
            return self.sites.found(stage, tensor, nd, part) or self.sites.box(
                stage, spec, held, nd, part, node, waits=self._two_layers_ago(stage, part, node.layer)
            )
        found = self.sites.found(stage, tensor, nd, part)
        if found is None and part != "F" and (tensor, node.origin) not in self.reboxed and node.layer not in self.plan.recompute:
            # What the forward node read is kept for the backward as it was.
            found = self.sites.made.get((stage, tensor, nd, "F"))
        if found is not None:
            return found
        # What a recomputed layer's gradients alone read lies where its kernel left it.
        have = self.hubbed.get(self._home(stage, tensor)) or self.unboxed.get(self._home(stage, tensor))
        if have is None:
            raise PlanError(f"node `{node.name}` on stage {stage} needs `{tensor}`, which has not reached it")
        # What was kept from the forward is there long before: its boxing, too, must not run ahead.
        waits = self._two_layers_ago(stage, part, node.layer) if part != "F" else ()
        return self.sites.box(stage, spec, have, nd, part, node, waits=waits)

    def _two_layers_ago(self, stage: int, part: str, layer: int) -> tuple[str, ...]:
        """What the gathering of a parameter waits for, so that no more than the next layer's parameters are gathered ahead of their use."""
        done = self.last_of_layer.get((stage, "F" if part == "F" else "I"), {})
        before = [value for at, value in done.items() if at != layer]
        return (before[-2],) if len(before) > 1 else ()

    def _load(self, stage: int, spec: Tensor, nd: NdSbp) -> str:
        name = self.sites.value(stage, spec, nd, "F", memory="input")
        self.sites.task(
            stage, "F", "load", whole_name(spec.name), f"{name}.load", writes=(name,), queue="load", origin=spec.name, first=start_of(self.plan, stage)
        )
        return name

    # ---- parameters --------------------------------------------------------------------------------------------------------------------------------

    def _begin_param(self, stage: int, spec: Tensor) -> None:
        """The parameter's state, and the copy that the microbatches read where it differs."""
        if spec.name not in self.plan.params:
            raise PlanError(f"the plan says nothing about parameter `{spec.name}`; it was made for another model: plan again")
        place = self.plan.params[spec.name]
        elsewhere = self.sites.is_counted_elsewhere(stage, spec.name)
        state = replace(spec, dtype=self.sites.state_dtype)
        memory = "optimizer" if self.sites.wide else "parameter"
        kept: dict[str, Any] = {"clock": "step", "initial": True, "counted_elsewhere": elsewhere}
        if spec.frozen:
            self.sites.value(stage, spec, place.held, "begin", memory="parameter", **kept)
            return
        if self.sites.wide:
            master = self.sites.value(stage, replace(state, name=f"{spec.name}@master"), place.state, "begin", memory=memory, **kept)
            name = self.sites.value(stage, spec, place.state, "begin", clock="step", memory="parameter")
            self.sites.task(
                stage, "begin", "compute", "cast", f"{spec.name}.cast", reads=(master,), writes=(name,), rules=identity_rules(place.state),
                attrs={"dtype": self.plan.dtype}, phase="U", origin=spec.name,
            )  # fmt: skip
        else:
            name = self.sites.value(stage, state, place.state, "begin", memory=memory, **kept)
        self.sites.box(stage, spec, name, place.held, "begin", None, clock="step", memory="parameter")

    def _param_of(self, tensor: str) -> str | None:
        behind = self.joint.stands_for.get(tensor)
        if not tensor.startswith("d.") or behind is None:
            return None
        spec = self.graph.tensors[behind]
        return behind if spec.role == "param" and not spec.frozen else None

    def _adds_up(self, node: Node, tensor: str, nd: NdSbp) -> bool:
        """Whether a kernel's output goes straight into the accumulator of a gradient."""
        param = self._param_of(tensor)
        return param is not None and nd == self.plan.params[param].grad

    def _accumulator(self, stage: int, tensor: str, nd: NdSbp) -> str:
        """What a use of a parameter adds to, in the passes of all pieces."""
        key = self.sites.site_of[stage], whole_name(tensor)
        if key not in self.accumulators:
            spec = replace(self.graph.tensors[tensor], name=f"{whole_name(tensor)}@acc", dtype=self.sites.state_dtype)
            self.accumulators[key] = self.sites.value(stage, spec, nd, "W", clock="step", memory="gradient")
        return self.accumulators[key]


__all__ = ["place"]
