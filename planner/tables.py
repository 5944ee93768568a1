"""The cost tables of the placement search: built once for every class of equal nodes and tensors, with numpy, and kept between searches.

Indices: a tensor class numbers its legal placements (`Boxes.places`); the states of a node, a hub or a parameter are arrays of such numbers, so that the table
of an edge is a box table indexed by them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.boxing import joint_steps, kind_1d, legal, may_step
from ir.graph import Node, Tensor
from ir.op import ALL_B, Op, Rule, nd_placements
from ir.ops import catalogue
from ir.sbp import P_MAX, B, NdSbp, P, S, Sbp, local_shape
from ir.units import DTYPE_BYTES
from planner.facts import NodeFacts
from planner.optimizers import Update, attrs_of, state_dtype, updated
from planner.owners import num_slots, stack_places
from planner.pricing import Pricing, step_price, work_of

Table = NDArray[np.float64]
Index = NDArray[np.intp]


@dataclass(frozen=True)
class Boxes:
    """Every legal placement of one shape on one mesh: local bytes, and the seconds of the cheapest chain between any two."""

    shape: tuple[int, ...]
    itemsize: int
    has_max: bool
    axes: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    pricing: Pricing = field(repr=False)

    @cached_property
    def places(self) -> tuple[NdSbp, ...]:
        one = (B, P, *((P_MAX,) if self.has_max else ()), *map(S, range(len(self.shape))))
        return tuple(nd for nd in itertools.product(one, repeat=len(self.axes)) if legal(self.shape, nd, self.mesh_shape))

    @cached_property
    def index(self) -> Mapping[NdSbp, int]:
        return {nd: i for i, nd in enumerate(self.places)}

    def of(self, places: Iterable[NdSbp]) -> Index:
        return np.array([self.index[nd] for nd in places], dtype=np.intp)

    @cached_property
    def nbytes(self) -> Table:
        """Bytes on the rank that has most."""
        return np.array([math.prod(local_shape(self.shape, nd, self.mesh_shape)) * self.itemsize for nd in self.places], dtype=float)

    @cached_property
    def local_s(self) -> Table:
        """Seconds to read and write a local copy once each."""
        return np.array([self.pricing.local_s(2 * n) for n in self.nbytes])

    @property
    def added_s(self) -> Table:
        """Seconds to add one local copy to another: two reads and a write, one and a half times what a copy takes."""
        return 1.5 * self.local_s

    @cached_property
    def cost(self) -> Table:
        """[src, dst]: what `ir.boxing.chain` costs under the same price; inf where there is no way.

        As there, a chain enters P only on an axis whose goal is P.
        """
        steps, enters = self._steps()
        out = np.full(steps.shape, np.inf)
        goals = np.array([[s.is_partial for s in nd] for nd in self.places], dtype=bool).reshape(len(self.places), len(self.axes))
        for pattern in itertools.product((False, True), repeat=len(self.axes)):
            columns = np.flatnonzero((goals == np.array(pattern, dtype=bool)).all(axis=1))
            allowed = [-1, *(axis for axis, partial in enumerate(pattern) if partial)]
            way = np.where(np.isin(enters, allowed), steps, np.inf)
            np.fill_diagonal(way, 0.0)
            for k in range(len(way)):
                np.minimum(way, way[:, k, None] + way[None, k, :], out=way)
            out[:, columns] = way[:, columns]
        return out

    def _steps(self) -> tuple[Table, Index]:
        """Seconds of every single step, and the axis on which it enters P, -1 for none."""
        n = len(self.places)
        cost, enters = np.full((n, n), np.inf), np.full((n, n), -1, dtype=np.intp)
        seconds = cache(partial(step_price, self.pricing))
        for i, src in enumerate(self.places):
            for axis in range(len(self.axes)):
                for target in (B, P, *((P_MAX,) if self.has_max else ()), *map(S, range(len(self.shape)))):
                    here = src[axis]
                    if target == here or (here.is_partial and target.is_partial) or (here.is_split and target == P_MAX):
                        continue
                    dst = (*src[:axis], target, *src[axis + 1 :])
                    j = self.index.get(dst)
                    if j is None or not may_step(src, dst, axis):
                        continue
                    cost[i, j] = seconds(self.axes[axis], kind_1d(here, target), self.nbytes[i], self.nbytes[j])
                    if target.is_partial:
                        enters[i, j] = axis
            for step in joint_steps(src, self.shape, self.mesh_shape):
                j = self.index[step.dst]
                cost[i, j] = min(cost[i, j], seconds(step.over(self.axes), step.kind, self.nbytes[i], self.nbytes[j]))
        return cost, enters


@dataclass(frozen=True, eq=False)
class NodeClass:
    """All nodes that are alike: states (one rule for each axis), seconds forward and of the gradient operators, placements by operand and state.

    `ins`, `outs`: placements of the operands; `cots`: of the cotangents of the inputs as given; `needs`: of the cotangents of the outputs as needed.
    """

    facts: NodeFacts
    states: tuple[tuple[Rule, ...], ...]
    forward_s: Table
    backward_s: Table
    in_boxes: tuple[Boxes, ...]
    out_boxes: tuple[Boxes, ...]
    ins: tuple[Index, ...]
    outs: tuple[Index, ...]
    cots: tuple[Index, ...]
    needs: tuple[Index, ...]


@dataclass(frozen=True, eq=False)
class HubClass:
    """All tensors that are alike; a state is a pair (value, cotangent) for each axis.

    `common`: where several equal readers find the value, boxed once for all of them; the value's own placement where they do not share.
    """

    boxes: Boxes
    differentiable: bool
    states: tuple[tuple[tuple[Sbp, Sbp], ...], ...]
    value: Index
    cotangent: Index
    common: Index


@dataclass(frozen=True, eq=False)
class ParamClass:
    """All parameters that are alike; a state is a triple (state, held, grad) for each axis.

    Once a step: `reduce_s` brings grad -> state for each use, `gather_s` state -> held, `update_s` updates. `params`, `optimizer`: bytes that stay on a rank.
    Gradients accumulate, and are brought to the state, as wide as the state: placements in `wide`.
    """

    boxes: Boxes
    wide: Boxes
    states: tuple[tuple[tuple[Sbp, Sbp, Sbp], ...], ...]
    state: Index
    held: Index
    grad: Index
    reduce_s: Table
    gather_s: Table
    update_s: Table
    params: Table
    optimizer: Table

    @cached_property
    def apart(self) -> NDArray[np.bool_]:
        """By state whether the gradient at the state is no run of the accumulator's bytes: only what cuts dim 0 leaves one."""
        return np.array([any(state != grad and state.is_split and state.dim > 0 for state, _, grad in nd) for nd in self.states], dtype=bool)

    def grads(self, num_uses: int) -> Table:
        """Bytes of gradients by state: one accumulator for each use, and the sum at the state where it cannot lie in the accumulator (`planner.inplace`)."""
        total: Table = self.wide.nbytes[self.state] * (self.apart | (num_uses > 1))
        return total + num_uses * self.wide.nbytes[self.grad]


AnyClass = NodeClass | HubClass | ParamClass


@dataclass(frozen=True, eq=False)
class Choice:
    """The states of a class that are open in some problem: each placement in `rows` in each of `ways`, all placements of the first way first.

    A node runs ONCE or AGAIN in the backward. What a hub holds is KEPT there for the backward, kept APART by each use, or made AGAIN for its own layer.
    """

    cls: AnyClass
    rows: Index
    ways: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows) * len(self.ways)

    def row(self, state: int) -> int:
        """The state of the class."""
        return int(self.rows[state % len(self.rows)])

    def way(self, state: int) -> str:
        return self.ways[state // len(self.rows)]


ONCE, AGAIN, KEPT, APART = "once", "again", "kept", "apart"


@dataclass
class Tables:
    """The memory of the search for one mesh and one pricing: classes and box tables by what they depend on.

    Axes of size 1 are left out by the caller: on them there is nothing to choose.
    """

    pricing: Pricing
    axes: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def boxes(self, tensor: Tensor, has_max: bool = False) -> Boxes:
        key = ("boxes", tensor.shape, DTYPE_BYTES[tensor.dtype], has_max)
        if key not in self.memo:
            self.memo[key] = Boxes(tensor.shape, key[2], has_max, self.axes, self.mesh_shape, self.pricing)
        found: Boxes = self.memo[key]
        return found

    # ---- nodes -----------------------------------------------------------------------------------------------------------------------------------

    def node(self, node: Node, facts: NodeFacts, tensors: Mapping[str, Tensor], maxima: frozenset[str], uneven: frozenset[str]) -> NodeClass:
        """The class of a node; `maxima` are the tensors that may be P(max), `uneven` the labels that need not divide."""
        ins, outs = [tensors[t] for t in node.inputs], [tensors[t] for t in node.outputs]
        attrs = tuple((k, repr(v)) for k, v in node.attrs.items() if k != "salt")
        peaks = tuple(t.name in maxima for t in (*ins, *outs))
        key = ("node", node.op, tuple((t.shape, t.dtype) for t in (*ins, *outs)), peaks, attrs, facts.carries, uneven)
        if key not in self.memo:
            self.memo[key] = self._node(node, facts, ins, outs, peaks, uneven)
        found: NodeClass = self.memo[key]
        return found

    def _node(
        self, node: Node, facts: NodeFacts, ins: Sequence[Tensor], outs: Sequence[Tensor], peaks: Sequence[bool], uneven: frozenset[str]
    ) -> NodeClass:  # fmt: skip
        op = facts.op
        sizes = op.bind([t.shape for t in ins], node.attrs, node.name)
        on_axes = [_rules(facts, sizes, n, uneven) for n in self.mesh_shape]
        states = tuple(nd for nd in itertools.product(*on_axes) if _fits(op, sizes, _cuts(nd, self.mesh_shape), uneven))
        dtype = next((t.dtype for t in (*ins, *outs) if not t.dtype.startswith("int")), outs[0].dtype)
        seconds = self._seconds(node, facts, sizes, states, dtype)
        boxes = tuple(self.boxes(t, peak) for t, peak in zip((*ins, *outs), peaks, strict=True))
        boxes_in, boxes_out = boxes[: len(ins)], boxes[len(ins) :]
        per_axis = [[(op.placements(r), op.cotangents(r)) for r in nd] for nd in states]

        def side(boxes: Sequence[Boxes], what: int, which: int) -> tuple[Index, ...]:
            return tuple(box.of(tuple(axis[what][which][i] for axis in state) for state in per_axis) for i, box in enumerate(boxes))

        return NodeClass(
            facts, states, *seconds, boxes_in, boxes_out, side(boxes_in, 0, 0), side(boxes_out, 0, 1), side(boxes_in, 1, 0), side(boxes_out, 1, 1),
        )  # fmt: skip

    def _seconds(self, node: Node, facts: NodeFacts, sizes: Mapping[str, int], states: Sequence[tuple[Rule, ...]], dtype: str) -> tuple[Table, Table]:
        """Forward and backward seconds by state; states with equal local sizes are priced once, and a kernel that only copies is left out of a Program."""
        known: dict[tuple[int, ...], tuple[float, float]] = {}
        width = DTYPE_BYTES[dtype]
        out = np.empty((2, len(states)))
        for i, nd in enumerate(states):
            local = dict(sizes)
            for rule, parts in zip(nd, self.mesh_shape, strict=True):
                if rule.kind == "split":
                    local[rule.on] = -(-local[rule.on] // parts)
            key = tuple(local.values())
            if key not in known:
                forward, *backward = (
                    0.0 if op.copies else self.pricing.compute_s(op.name, dtype, *work_of(op, local, node.attrs, width)) for op in (facts.op, *facts.grads)
                )
                known[key] = (forward, sum(backward))
            out[:, i] = known[key]
        return out[0], out[1]

    # ---- hubs ------------------------------------------------------------------------------------------------------------------------------------

    def hub(self, tensor: Tensor, uneven_dims: frozenset[int], differentiable: bool, has_max: bool, is_output: bool, is_shared: bool) -> HubClass:
        """The class of a tensor's hub; the cotangent of an output is the seed, which is B. `is_shared`: several equal nodes read it."""
        key = ("hub", tensor.shape, tensor.dtype, uneven_dims, differentiable, has_max, is_output, is_shared)
        if key not in self.memo:
            self.memo[key] = self._hub(tensor, uneven_dims, differentiable and not is_output, has_max, is_shared)
        found: HubClass = self.memo[key]
        return found

    def _hub(self, tensor: Tensor, uneven_dims: frozenset[int], sums: bool, has_max: bool, is_shared: bool) -> HubClass:
        """`sums`: the cotangent may be left P. A shared tensor may be split and its cotangents still be summed as P, and scattered once."""
        boxes = self.boxes(tensor, has_max)
        dims = tuple(map(S, range(len(tensor.shape))))
        pairs = [(B, B), *(((B, P),) if sums else ()), (P, B), *(((P_MAX, B),) if has_max else ()), *((s, s) for s in dims)]
        pairs += [(s, P) for s in dims] if sums and is_shared else []
        on_axis = [(value, cotangent, value) for value, cotangent in pairs]
        on_axis += [(value, cotangent, B) for value, cotangent in pairs if is_shared and (value.is_split or value == P)]
        nds = [nd for nd in itertools.product(on_axis, repeat=len(self.axes)) if self.even(tensor.shape, tuple(t[0] for t in nd), uneven_dims)]
        value, cotangent, common = (boxes.of(tuple(t[i] for t in nd) for nd in nds) for i in range(3))
        return HubClass(boxes, sums, tuple(tuple((v, c) for v, c, _ in nd) for nd in nds), value, cotangent, common)

    def even(self, shape: Sequence[int], nd: NdSbp, uneven_dims: frozenset[int]) -> bool:
        """Whether every split dim divides, or may be uneven and leaves no part empty."""
        for dim in {s.dim for s in nd if s.is_split}:
            parts = math.prod(n for s, n in zip(nd, self.mesh_shape, strict=True) if s == S(dim))
            if shape[dim] % parts and (dim not in uneven_dims or shape[dim] < parts):
                return False
        return True

    # ---- parameters ------------------------------------------------------------------------------------------------------------------------------

    def param(self, tensor: Tensor, uneven_dims: frozenset[int], update: Update | None) -> ParamClass:
        """The class of a parameter; `update` None: frozen."""
        key = ("param", tensor.shape, tensor.dtype, uneven_dims, id(update))
        if key not in self.memo:
            self.memo[key] = (update, self._param(tensor, uneven_dims, update) if update else self._frozen(tensor, uneven_dims))
        found: ParamClass = self.memo[key][1]
        return found

    def _frozen(self, tensor: Tensor, uneven_dims: frozenset[int]) -> ParamClass:
        """Without gradient, state and update it lies where it is held."""
        boxes = self.boxes(tensor)
        one = [(s, s, s) for s in (B, *map(S, range(len(tensor.shape))))]
        states = tuple(nd for nd in itertools.product(one, repeat=len(self.axes)) if self.even(tensor.shape, tuple(t[0] for t in nd), uneven_dims))
        held = boxes.of(tuple(t[0] for t in nd) for nd in states)
        nothing = np.zeros(len(states))
        return ParamClass(boxes, boxes, states, held, held, held, nothing, nothing, nothing, boxes.nbytes[held], nothing)

    def _param(self, tensor: Tensor, uneven_dims: frozenset[int], update: Update) -> ParamClass:
        boxes, wide = self.boxes(tensor), self.boxes(replace(tensor, dtype=state_dtype(tensor.dtype)))
        triples: list[tuple[Sbp, Sbp, Sbp]] = [(B, B, B), (B, B, P)]
        for d in range(len(tensor.shape)):
            triples += [(S(d), held, grad) for held in (B, S(d)) for grad in (S(d), P, B)]
        legal_states = self._legal_states(tensor, uneven_dims, update)
        states = tuple(nd for nd in itertools.product(triples, repeat=len(self.axes)) if tuple(t[0] for t in nd) in legal_states)
        state, held, grad = (boxes.of(tuple(t[i] for t in nd) for nd in states) for i in range(3))
        apart = boxes.nbytes[held] * (state != held)
        updating, kept = np.zeros((2, len(wide.places)))
        for i in np.unique(state):
            updating[i] = self._update_s(update, wide, wide.places[i], tensor.dtype)
            places = update.state_places(wide.places[i])
            kept[i] = sum(self._local_bytes(t, place) for t, place in zip(update.states, places, strict=True))
        kept += wide.nbytes * (wide is not boxes)
        return ParamClass(
            boxes, wide, states, state, held, grad, wide.cost[grad, state], boxes.cost[state, held], updating[state], boxes.nbytes[state] + apart, kept[state],
        )  # fmt: skip

    def _legal_states(self, tensor: Tensor, uneven_dims: frozenset[int], update: Update) -> frozenset[NdSbp]:
        """Where the optimizer's states may lie."""
        one = (B, *map(S, range(len(tensor.shape))))
        every = itertools.product(one, repeat=len(self.axes))
        return frozenset(nd for nd in every if self.even(tensor.shape, nd, uneven_dims) and update.is_legal(nd, self.mesh_shape))

    def _local_bytes(self, tensor: Tensor, nd: NdSbp) -> int:
        return math.prod(local_shape(tensor.shape, nd, self.mesh_shape)) * DTYPE_BYTES[tensor.dtype]

    def _update_s(self, update: Update, wide: Boxes, nd: NdSbp, dtype: str) -> float:
        """Seconds of the update where the weights' state lies at `nd`: kernels, what is re-sharded between them, a cast where there is a master copy."""
        state = state_dtype(dtype)
        widths = {t.name: DTYPE_BYTES[t.dtype] for t in update.states if t.dtype != state}
        made: dict[str, tuple[Boxes, NdSbp]] = {}
        boxed: dict[tuple[str, NdSbp], float] = {}
        seconds, slots = 0.0, num_slots(update, nd, self.mesh_shape)
        for op, rules in zip(update.ops, update.rules(nd), strict=True):
            ins, outs = nd_placements(rules, op)
            if slots > 1 and update.needs_whole(op):
                seconds += self._owned_s(update, op, rules, nd, slots) / slots
                outs = (nd,)
            else:
                seconds += self._kernel_s(update, op, rules, widths)
                for operand, place in zip(op.inputs, ins, strict=True):
                    if operand.name in made:
                        boxes, have = made[operand.name]
                        boxed[operand.name, place] = float(boxes.cost[boxes.index[have], boxes.index[place]])
            for operand, place in zip(op.outputs, outs, strict=True):
                if operand.name.removesuffix("2") not in updated(op):
                    made[operand.name] = (self.boxes(update.between(op, operand.name)), place)
        if state != dtype:
            n = math.prod(local_shape(wide.shape, nd, self.mesh_shape))
            seconds += self.pricing.compute_s("cast", state, *work_of(catalogue("cast").for_ranks([1]), {"b": n}, {}, wide.itemsize))
        return seconds + sum(boxed.values())

    def _kernel_s(self, update: Update, op: Op, rules: Sequence[Rule], widths: Mapping[str, int]) -> float:
        """Seconds of an operator of an update."""
        state = state_dtype(update.dtype)
        local = {label: -(-update.sizes[label] // parts) for label, parts in (dict.fromkeys(op.labels, 1) | _cuts(rules, self.mesh_shape)).items()}
        return self.pricing.compute_s(op.name, state, *work_of(op, local, attrs_of(update, op), DTYPE_BYTES[state], widths))

    def _owned_s(self, update: Update, op: Op, rules: Sequence[Rule], nd: NdSbp, slots: int) -> float:
        """Seconds of a full stack that is dealt to owners: laying it, bringing it to them, its operator on one slot, and the way back."""
        seconds = 0.0
        laid, working, taken = stack_places(nd, rules)
        for operand, src, dst in ((op.inputs[0], laid, working), (op.outputs[0], working, taken)):
            one = update.between(op, operand.name)
            boxes = self.boxes(replace(one, shape=(slots, *one.shape)))
            seconds += float(boxes.cost[boxes.index[src], boxes.index[dst]] + boxes.local_s[boxes.index[laid if dst == working else taken]])
        cuts = _cuts([rule for rule in rules if rule != ALL_B], [n for rule, n in zip(rules, self.mesh_shape, strict=True) if rule != ALL_B])
        local = {label: -(-update.sizes[label] // cuts.get(label, 1)) for label in op.labels}
        dtype = update.between(op, op.inputs[0].name).dtype
        return seconds + self.pricing.compute_s(op.name, dtype, *work_of(op, local, attrs_of(update, op), DTYPE_BYTES[dtype]))


def _rules(facts: NodeFacts, sizes: Mapping[str, int], parts: int, uneven: frozenset[str]) -> tuple[Rule, ...]:
    """Rules legal on one axis, judged on its own; `B~P` only where a cotangent passes."""
    legal_here = []
    for rule in facts.op.rules():
        if rule.kind == "split" and not _fits(facts.op, sizes, {rule.on: parts}, uneven):
            continue
        if rule.kind == "B~P" and not facts.grads:
            continue
        legal_here.append(rule)
    return tuple(legal_here)


def _fits(op: Op, sizes: Mapping[str, int], cuts: Mapping[str, int], uneven: frozenset[str]) -> bool:
    """Whether labels may be cut into these numbers of parts: evenly, or unevenly where that is allowed and leaves no part empty."""
    return all(sizes[label] % parts == 0 or (label in uneven and not op.must_divide(label) and sizes[label] >= parts) for label, parts in cuts.items())


def _cuts(nd: Sequence[Rule], mesh_shape: Sequence[int]) -> dict[str, int]:
    cuts: dict[str, int] = {}
    for rule, parts in zip(nd, mesh_shape, strict=True):
        if rule.kind == "split":
            cuts[rule.on] = cuts.get(rule.on, 1) * parts
    return cuts
