"""Attention over the mesh axis `cp` of a plan: its nodes written out as turns of a ring, and sequences in zig-zag order, as `Plan.context` says.

The ring is written into the graph of there and back, after the gradients are derived: a turn of the backward reads the result of all turns and so is exact
by itself, where the gradient of a join would need a cotangent of `lse`. Every node that is added is an operator with a sentence, and has rules and hubs in
the plan, so that placement, credits, memory and price need not know of rings; a `shift` along the split sequence is what `planner.place` makes a message of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ir.errors import PlanError
from ir.graph import Graph, Node, Tensor
from ir.op import ALL_B, LEADING, Rule, nd_placements
from ir.ops import catalogue
from ir.plan import Hub, Plan
from ir.sbp import NdSbp, Sbp
from planner.autodiff import Joint
from planner.context import AXIS, FORMS, form_of, inner_of, is_positional, refusal
from planner.place import AFTER

GIVEN = ("dq", "dk", "dv")

Pair = tuple[str, str]
"""Keys and values, or a result and the logarithm of its denominator."""

_TURN = {"attention": "attention_part", "attention.grad": "attention_part.grad"}


def num_parts(plan: Plan) -> int:
    """Ranks of the context-parallel axis; 1 where there is none."""
    return plan.mesh_shape[plan.axes.index(AXIS)] if AXIS in plan.axes else 1


def is_zigzag(plan: Plan) -> bool:
    return plan.context.endswith("zigzag")


def ordered(graph: Graph, plan: Plan) -> Graph:
    """The forward graph whose operators know that sequences lie in zig-zag order, if they do."""
    if not is_zigzag(plan):
        return graph
    nodes = tuple(replace(n, attrs={**n.attrs, "zigzag": num_parts(plan)}) if is_positional(n) else n for n in graph.nodes)
    return replace(graph, nodes=nodes)


def with_rings(joint: Joint, plan: Plan) -> Joint:
    """Every attention, and its gradient, as turns of a ring."""
    if not plan.context.startswith("ring"):
        return joint
    return _Rings(joint, num_parts(plan), inner_of(plan.context, num_parts(plan))).run()


class _Rings:
    """`inner`: parts that go round in a ring of their own, after which all such blocks move on to the next one."""

    def __init__(self, joint: Joint, parts: int, inner: int) -> None:
        self.joint, self.parts, self.inner = joint, parts, inner
        self.nodes: list[Node] = []
        self.done: tuple[str, ...] = ()
        self.tensors: dict[str, Tensor] = dict(joint.graph.tensors)

    def run(self) -> Joint:
        for n in self.joint.graph.nodes:
            if n.op == "attention":
                self._forward(n)
            elif n.op == "attention.grad":
                self._backward(n)
            else:
                self.nodes.append(n)
        graph = self.joint.graph
        return replace(self.joint, graph=Graph(graph.name, tuple(self.nodes), self.tensors, graph.outputs))

    def _add(self, like: Node, op: str, what: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> None:
        self.nodes.append(Node(f"{like.name}.{what}", op, tuple(inputs), tuple(outputs), attrs, like.layer, like.phase, like.origin or like.name))

    def _like(self, like: Node, tensor: str, what: str) -> str:
        """A new tensor of the shape of another."""
        name = f"{like.name}.{what}"
        self.tensors[name] = replace(self.tensors[tensor], name=name, role="value")
        return name

    def _shift(self, n: Node, tensor: str, like: str, what: str, after: tuple[str, ...] = (), of_blocks: bool = False, out: str = "") -> str:
        """`after`: what must be there before the message is sent, so that it does not run ahead. `out`: what it gives, else a new tensor."""
        out = out or self._like(n, like, what)
        blocks = {"inner": self.inner, "of_blocks": of_blocks} if self.inner < self.parts else {}
        self._add(n, "shift", f"{what}.shift", [tensor], [out], parts=self.parts, **blocks, **({AFTER: after} if after else {}))
        return out

    def _sent(self, n: Node, turn: int, held: Pair, after: tuple[str, ...], of_blocks: bool = False) -> Pair:
        """The keys and values on their way to where they are in this turn."""
        k, v = (self._shift(n, t, t, f"{x}{turn}", after, of_blocks) for t, x in zip(held, "kv", strict=True))
        return k, v

    def _turn(self, n: Node, turn: int, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        inner = {"inner": self.inner} if self.inner < self.parts else {}
        self._add(n, _TURN[n.op], f"turn{turn}", inputs, outputs, **{**n.attrs, "parts": self.parts, "turn": turn, **inner})

    def _keys(self, n: Node, own: Pair) -> Iterator[tuple[int, Pair, Pair]]:
        """(turn, keys and values that are here in it, those that come in for the next one). What is sent in a turn waits for what `self.done` names then.

        A round begins with sending what is here to the next block, where it is used when the round is over.
        """
        here, next_block = own, ("", "")
        for turn in range(self.parts):
            coming = ("", "")
            if turn % self.inner == 0 and turn + self.inner < self.parts and self.inner < self.parts:
                next_block = self._sent(n, turn + self.inner, here, self.done, of_blocks=True)
            if (turn + 1) % self.inner:
                coming = self._sent(n, turn + 1, here, self.done)
            elif turn + 1 < self.parts:
                coming = next_block
            yield turn, here, coming
            here = coming

    def _forward(self, n: Node) -> None:
        """While a turn computes, the keys and values of the next one come in, and no others: what has been used makes room for them."""
        (q, k, v), (out, lse) = n.inputs, n.outputs
        so_far, self.done = ("", ""), ()
        for turn, held, coming in self._keys(n, (k, v)):
            mine = (self._like(n, out, f"out{turn}"), self._like(n, lse, f"lse{turn}"))
            self._turn(n, turn, (q, *held), mine)
            if turn:
                last = turn == self.parts - 1
                total = (out, lse) if last else (self._like(n, out, f"sum{turn}"), self._like(n, lse, f"norm{turn}"))
                attrs = {label: self.joint.graph.sizes(n)[label] for label in ("r", "w")}
                self._add(n, "join_parts", f"join{turn}", (*so_far, *mine), total, **attrs, **({} if last else {AFTER: coming}))
                mine = total
            so_far, self.done = mine, (mine[1],)

    def _backward(self, n: Node) -> None:
        """Keys and values go round once more; with them the sums of their gradients, which one shift more brings home."""
        dout, q, k, v, out, lse = n.inputs
        # what was kept from the forward is there long before
        self.done, total, sums, brought = (dout,), "", list[str](), list[str]()
        for turn, held, coming in self._keys(n, (k, v)):
            mine, last = [self._like(n, t, f"{x}{turn}") for t, x in zip(n.outputs, GIVEN, strict=True)], turn == self.parts - 1
            self._turn(n, turn, (dout, q, *held, out, lse), mine)
            if turn % self.inner:
                came = [self._shift(n, t, t, f"{x}{turn}.came") for t, x in zip(sums, GIVEN[1:], strict=True)]
                sums = [self._added(n, f"{x}{turn}", old, new, t) for x, old, new, t in zip(GIVEN[1:], came, mine[1:], n.outputs[1:], strict=True)]
            else:
                sums = mine[1:]
            total = self._added(n, f"dq{turn}", total, mine[0], n.outputs[0], last, () if last else coming) if turn else mine[0]
            self.done = (total,)
            if (turn + 1) % self.inner == 0:
                brought = self._brought(n, turn, sums, brought)

    def _brought(self, n: Node, turn: int, sums: Sequence[str], brought: Sequence[str]) -> list[str]:
        """At the end of a round: the sums of a block come back to where the round began, are added to what blocks before it have brought, and go on."""
        nested, out = self.inner < self.parts, list[str]()
        for at, (total, home, x) in enumerate(zip(sums, n.outputs[1:], GIVEN[1:], strict=True)):
            back = self._shift(n, total, home, f"{x}.round{turn}" if nested else x, out="" if nested else home)
            if nested:
                back = self._added(n, f"{x}.block{turn}", brought[at], back, home) if brought else back
                last = turn == self.parts - 1
                back = self._shift(n, back, home, x if last else f"{x}.from{turn}", of_blocks=True, out=home if last else "")
            out.append(back)
        return out

    def _added(self, n: Node, what: str, old: str, new: str, like: str, last: bool = False, after: tuple[str, ...] = ()) -> str:
        """The sum of two tensors, that of all where it is the last."""
        total = like if last else self._like(n, like, f"{what}.sum")
        self._add(n, "add", f"{what}.add", (old, new), (total,), **({AFTER: after} if after else {}))
        return total


def ringed_plan(plan: Plan, joint: Joint) -> Plan:
    """The plan with rules and hubs for the nodes of its rings: those of the attention that they are turns of."""
    if not plan.context.startswith("ring"):
        return plan
    graph, rules, hubs = joint.graph, dict(plan.rules), dict(plan.hubs)
    where: dict[str, NdSbp] = {}
    for n in graph.nodes:
        of = plan.rules.get(n.origin)
        if of is None or n.name in plan.rules or not (n.op in ("shift", "join_parts", "add") or n.op.startswith("attention_part")):
            continue
        op = graph.op(n)
        if n.op == "attention_part.grad":
            forward = catalogue("attention_part")
            rules[n.name] = tuple(forward.grad_rule(rule, op) for rule in of)
        elif n.op == "join_parts":
            rules[n.name] = tuple(_joining(sbp) for sbp in where[n.inputs[0]])
        elif n.op == "attention_part":
            rules[n.name] = of
        elif n.inputs[0] in where or n.op == "shift":
            at = where.get(n.inputs[0]) or _entering(n, of)
            rules[n.name] = tuple(_passing(sbp, n.op) for sbp in at)
        else:
            continue  # a sum of cotangents, of which the ring knows nothing
        outs = nd_placements(rules[n.name], op)[1]
        for t, nd in zip(n.outputs, outs, strict=True):
            where[t] = nd
            if t not in plan.hubs and n.phase in ("F", "R") and t not in joint.stands_for:
                hubs[t] = Hub(nd, nd)
    return replace(plan, rules=rules, hubs=hubs)


def _entering(n: Node, of: Sequence[Rule]) -> NdSbp:
    """Where the keys or values that a first shift sends on lie."""
    ins = nd_placements(of, catalogue("attention_part"))[0]
    return ins[1 if n.name.rpartition(".")[0].rpartition(".")[2].startswith("k") else 2]


def _passing(sbp: Sbp, op: str) -> Rule:
    """The rule of a shift or a sum on operands in this placement."""
    if sbp.is_split:
        return Rule("split", (LEADING if op == "add" else ("b", "s", "h"))[sbp.dim])
    return Rule("linear", "x+y" if op == "add" else "x") if sbp.is_partial else ALL_B


def _joining(sbp: Sbp) -> Rule:
    if sbp.is_split:
        return Rule("split", ("b", "s", "g")[sbp.dim])
    return Rule("linear", "x+y") if sbp.is_partial else ALL_B


def check_context(graph: Graph, plan: Plan) -> None:
    """Raises PlanError where `plan.context` is none that the graph can be run with on the plan's mesh."""
    form, order = form_of(plan.context), plan.context.partition(" ")[2]
    if not plan.context:
        return
    if form not in FORMS or order not in ("", "zigzag"):
        raise PlanError(f"the plan says context `{plan.context}`; it can be {', '.join(FORMS)}, and with it zigzag")
    if num_parts(plan) == 1:
        raise PlanError(f"the plan says context `{plan.context}`, but its mesh has no axis {AXIS} of 2 ranks or more; plan again")
    told = plan.context.partition(" ")[0].partition(":")[2]
    if told and (form != "ring" or not told.isdecimal() or int(told) < 2 or num_parts(plan) % int(told)):
        raise PlanError(f"the plan says context `{plan.context}`; a ring of rings has a number of ranks in each that divides the {num_parts(plan)} of {AXIS}")
    if why := refusal(graph, num_parts(plan), form, order == "zigzag"):
        raise PlanError(f"context `{plan.context}` over {num_parts(plan)} ranks: {why}")
    for n in graph.nodes if form == "ring" else ():
        split = [axis for rule, axis in zip(plan.rules.get(n.name, ()), plan.axes, strict=False) if n.op == "attention" and rule == Rule("split", "s")]
        if n.op == "attention" and split != [AXIS]:
            raise PlanError(f"a ring splits the sequence of `{n.name}` on axis {AXIS} and no other; the plan has it on {', '.join(split) or 'none'}")


__all__ = ["check_context", "is_zigzag", "num_parts", "ordered", "ringed_plan", "with_rings"]
