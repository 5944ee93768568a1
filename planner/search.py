"""The search: from a model, a cluster and a batch to the best plans.

Outside, every layout (data, tensor, expert, pipeline parallel, microbatch, recompute) gets a lower bound from its floating point operations alone
(`planner.bounds`) and a sketch that orders the work (`planner.sketch`). What cannot fit however it is placed is pruned (`planner.footprint`). In that order
each is evaluated under 1F1B (`planner.evaluate`); what cannot beat the best found is pruned by its bound; when many in a row do not better it, the rest is
left; while many are too big and nothing fits, the smallest come first. Then the layouts whose busiest rank has least to do are timed under every other
schedule, for the best an order of their own is searched, and where ranks wait still, sequences in pieces and two copies of the parameters are tried. The best
few are simulated. Whatever was left out stands by its bound, and the gap says how much better it could be.
The same input gives the same plans, but where the time runs out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ir.cluster import Cluster
from ir.errors import DoesNotFit, PlanError
from ir.plan import Plan
from ir.units import GIB, dtype_name, nbytes
from planner.bounds import Bounds
from planner.candidates import Candidate, bases, fix_stages, parse_fix, variants, whole_variants, why_none
from planner.compare import decide_alike
from planner.evaluate import Evaluated, Evaluator
from planner.foretell import SMALL
from planner.frontends.model import Model
from planner.hints import Hint
from planner.lessons import Lessons
from planner.optimizers import with_defaults
from planner.reasons import advice, why
from planner.ways_out import ways_out
from simulator.cost import CostModel
from simulator.memory import SAFE_FRACTION

NEAR = 1.15
"""A candidate whose lower bound is this many times the best estimate is not worth placing, even where the list of plans could be longer."""

PATIENCE = 10
"""So many candidates in a row that do not better the best end the search; those left are told by their bounds (`gap`)."""

TOO_BIG = 1.5
"""How many times as long as its smallest draft a candidate is taken to need that does not fit, where those like it are judged by it."""

FILLED = 0.02
"""Share of a step that placing layer by layer for the memory that is left over is taken to save at most."""

RISK = 0.02
"""Share of a step by which a plan whose memory is tight must be faster to be told before one that fits."""

SEARCH_SHARE = 0.5
"""Of the budget that the search may use; the rest is for simulating the best."""

STUBBORN = 4
"""So many in a row that do not better the best end the search where nothing that waits promises to, and the comparison of schedules."""

NUM_DEARER = 2
"""Schedules of a layout that are tried at higher prices of memory where they do not fit at that of 1F1B: those that promise most."""

SQUEEZED = 0.15
"""The power of how many times too much a schedule keeps by which it is taken to be slower once it fits: twice as much costs a tenth of a step."""

NUM_SEARCHED = 2
"""Layouts, the best ones, for which an order of their own is searched."""

LONGEST = 1024
"""Microbatches times ranks up to which an order is searched."""

LEAST_WAIT = 0.1
"""Share of a step that ranks must wait for schedules to be tried whose plans are written whole."""

LEAST_GAIN = 0.01
"""Share of a step that ranks must wait for an order to be searched."""

Progress = Callable[[str, int, int], None]
"""progress(what is done now, how many are done, how many there are)."""


@dataclass(frozen=True)
class Result:
    """The best plans, best first, and what was searched for them.

    `searched`: candidates in the stated space; `evaluated`, `pruned`: what became of them. `gap`: the share of the best plan's step that a candidate could save
    by the lower bounds of all that was left out or not simulated; `optimal`: it is 0. `interrupted`: these are the best until then.
    """

    plans: tuple[Plan, ...]
    searched: int
    evaluated: int
    pruned: int
    seconds: float
    optimal: bool
    gap: float
    interrupted: bool = False


def plan(
    model: Model, cluster: Cluster, *, batch: int, seq: int, dtype: str = "bfloat16", optimizer: str | Mapping[str, Any] = "adamw", top: int = 5,
    fix: Mapping[str, Any] | None = None, memory_fraction: float = 0.95, budget_s: float = 30.0, progress: Progress | None = None, stages: str | None = None,
) -> Result:  # fmt: skip
    """The best `top` plans for a global `batch` of samples of `seq` tokens on all devices of the cluster.

    `memory_fraction` of the usable memory may be filled. `stages`: which layers each stage gets, as `planner.stages.parse_stages` reads it. After `budget_s`
    seconds, or at an interrupt, the best so far are returned, fewer than `top` maybe (nothing yet: the search goes on until something fits, and the interrupt
    goes to the caller). Raises DoesNotFit with the nearest plans and what would help
    when nothing fits, InputError or PlanError when `fix` contradicts the cluster or the model.
    """
    if top < 1:
        raise PlanError(f"top is {top}; ask for 1 plan or more")
    evaluator = _evaluator(model, cluster, batch, seq, dtype_name(dtype), with_defaults(optimizer), fix or {}, memory_fraction, stages)
    space = list(bases(evaluator.fix, cluster.num_devices, batch, evaluator.bounds.graph(1)))
    if not space:
        asked = f" and --fix {','.join(f'{k}={v}' for k, v in fix.items())}" if fix else ""
        refused = why_none(evaluator.fix, cluster.num_devices, batch, evaluator.bounds.graph(1))
        raise PlanError(f"no layout of `{model.name}` uses all {cluster.num_devices} devices with batch {batch}{asked}{refused}")
    return _Search(evaluator, space, top, time.perf_counter(), budget_s, progress).run()


def evaluate_fixed(model: Model, cluster: Cluster, like: Plan, fix: Mapping[str, Any]) -> Plan:
    """The best plan with the batch, dtype and optimizer of `like` that keeps `fix`, simulated, even if it does not fit. PlanError when there is none."""
    evaluator = _evaluator(model, cluster, like.batch, like.seq, like.dtype, like.optimizer, fix, 1.0)
    space = list(bases(evaluator.fix, cluster.num_devices, like.batch, evaluator.bounds.graph(1)))
    if not space:
        raise PlanError(f"no layout keeps {dict(fix)} on {cluster.num_devices} devices with batch {like.batch}")
    tried = [evaluator.evaluate(c) for c in _ordered(evaluator, space)[:4]]
    fitting = [e for e in tried if e.fits(1.0)]
    return evaluator.simulate(min(fitting or tried, key=_by_estimate))


def _evaluator(
    model: Model, cluster: Cluster, batch: int, seq: int, dtype: str, optimizer: Mapping[str, Any], fix: Mapping[str, Any], memory_fraction: float,
    stages: str | None = None,
) -> Evaluator:  # fmt: skip
    if not any(d.flops_per_s.get(dtype, 0.0) for d in cluster.devices):
        raise PlanError(f"the devices of `{cluster.name}` have no rate for {dtype}; they have {', '.join(cluster.devices[0].flops_per_s)}")
    bounds = Bounds(model, seq, dtype, CostModel(cluster))
    keep = parse_fix(fix, cluster.num_devices, batch, bounds.graph(1))
    keep = fix_stages(keep, stages, bounds.graph(1)) if stages else keep
    bounds = replace(bounds, given=keep.get("stages", ()), rows=keep.get("orders", ()))
    return Evaluator(bounds, cluster, batch, optimizer, keep, memory_fraction)


def _ordered(evaluator: Evaluator, space: Iterable[Candidate]) -> list[Candidate]:
    """The most promising first."""
    return sorted(space, key=lambda c: (evaluator.sketches.step_s(c), str(c)))


def _by_worth(plan: Plan) -> tuple[float, str]:
    step_s: float = plan.predicted["step_s"]
    return step_s * (1 + RISK * (plan.predicted["fits"] == "tight")), str(plan.layout)


def _by_estimate(e: Evaluated) -> tuple[float, str]:
    return e.estimate_s, str(e.candidate)


@dataclass
class _Search:
    """One search under way over `space`, points of the outer space but for their schedules. `left_out`: the bounds of candidates for which nothing else speaks;
    `beaten`: those of candidates that fit and were slower than another schedule of the same layout.
    """

    evaluator: Evaluator
    space: Sequence[Candidate]
    top: int
    began_s: float
    budget_s: float
    progress: Progress | None
    found: list[Evaluated] = field(default_factory=list)
    too_big: list[Evaluated] = field(default_factory=list)
    waiting: list[Candidate] = field(default_factory=list)
    put_off: list[Candidate] = field(default_factory=list)
    left_out: list[float] = field(default_factory=list)
    beaten: list[float] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    simulated: list[Evaluated] = field(default_factory=list)
    num_evaluated: int = 0
    num_pruned: int = 0
    num_whole: int = 0
    in_vain: int = 0
    interrupted: bool = False
    refused: PlanError | None = None
    lessons: Lessons = field(init=False)

    def run(self) -> Result:
        might = {c for c in self.space if self.evaluator.may_fit(c)}
        self._await(might)
        for c in self.space:
            if c not in might:
                self._put_off(c)
        try:
            self._explore()
            self._try_schedules()
            self._try_whole()
            self._try_put_off()
            self._try_loss_chunks()
            self._simulate(2 * self.top)
        except KeyboardInterrupt:
            if not self.found:
                raise
            self.interrupted = True
            self._simulate(1)
        if not self.found and not self.too_big and self.refused:
            raise self.refused
        if not self.plans:
            raise self._nothing_fits()
        for c in self.waiting:
            self.left_out += map(self.evaluator.bounds.lower_bound_s, self._variants(c))
        return self._result()

    def _await(self, candidates: Iterable[Candidate]) -> None:
        """These wait to be evaluated, ordered by their sketches."""
        sketched = {c: self.evaluator.sketches.step_s(c) for c in candidates}
        self.waiting = sorted(sketched, key=lambda c: (sketched[c], str(c)))
        self.lessons = Lessons(self.waiting, [sketched[c] for c in self.waiting])

    def _explore(self) -> None:
        """Evaluates what waits, as long as something is promising."""
        while self.waiting and not self._is_enough():
            promising = self._next()
            if promising is None:
                break
            self._try(promising)
            self.waiting.remove(promising)

    def _try_loss_chunks(self) -> None:
        """Where nothing fits, head and loss over chunks of tokens."""
        if self.found or "loss_chunks" in self.evaluator.fix:
            return
        missing = {e.candidate: e.memory.peak_bytes - self.evaluator.usable_bytes for e in self.too_big}
        may = [c for c in map(self.evaluator.in_loss_chunks, self.space) if c.loss_chunks > 1 and self.evaluator.may_fit(c)]
        may = [c for c in may if missing.get(replace(c, loss_chunks=1), 0.0) <= self.evaluator.logit_bytes(c)]
        self.space = (*self.space, *may)
        self._await(may)
        self._explore()
        if self.found:
            self.too_big.clear()
            self._try_schedules()

    def _variants(self, c: Candidate) -> tuple[Candidate, ...]:
        """The point under every schedule that is open, itself first."""
        return tuple(variants(c, self.evaluator.fix, self.evaluator.bounds.graph(1)))

    def _put_off(self, c: Candidate) -> None:
        """A point that cannot fit as it is; under schedules that keep less it might, which are tried where nothing else fits."""
        for v in self._variants(c):
            if self.evaluator.may_fit(v):
                self.put_off.append(v)
            else:
                self.num_pruned += 1

    def _try_put_off(self) -> None:
        """Where nothing fits, schedules that keep less than 1F1B on layouts for which that keeps too much; those that keep least first."""
        may = () if self.found else [c for c in self.put_off if c.schedule != "auto"]
        tried = sorted(may, key=lambda c: (self.evaluator.footprint.even_bytes(c), str(c)))[:PATIENCE]
        for c in tried:
            this = self.evaluator.evaluate(c, self._best_s())
            self.num_evaluated += 1
            (self.found if this.fits(self.evaluator.memory_fraction) else self.too_big).append(this)
        self.left_out += [self.evaluator.bounds.lower_bound_s(c) for c in self.put_off if c not in tried]

    def _next(self) -> Candidate | None:
        """The most promising one by what was learned so far; the smallest where many were too big and none has fitted; none where nothing is promising."""
        if not self.found and len(self.too_big) >= PATIENCE:
            return min(self.waiting, key=lambda c: (self.evaluator.footprint.least_bytes(c), str(c)))
        hopes = self.lessons.hopes_s(self.waiting) * np.array([self._filled(c) for c in self.waiting])
        at = int(hopes.argmin())
        return self.waiting[at] if len(self.found) < self.top or self.in_vain < STUBBORN or hopes[at] < self._best_s() else None

    def _filled(self, c: Candidate) -> float:
        """What another schedule may leave of a step under 1F1B: a third of its bubble, as ZB-H1 does where forward, input and weight gradients are equal."""
        m, bubble = c.num_microbatches, c.pp - 1
        return (m + bubble / 3) / (m + bubble) if "schedule" not in self.evaluator.fix else 1.0

    def _is_enough(self) -> bool:
        return bool(self.found) and (self.in_vain >= PATIENCE or self._is_late(SEARCH_SHARE))

    def _is_late(self, share: float) -> bool:
        """Whether this share of the budget is used up."""
        return time.perf_counter() - self.began_s > share * self.budget_s

    def _best_s(self) -> float:
        return min((e.estimate_s for e in self.found), default=math.inf)

    def _try(self, c: Candidate) -> None:
        """Evaluates one point under its first schedule, unless another speaks against it."""
        every = self._variants(c)
        twins = [replace(c, recompute=what) for what in ("none", "selective") if what != c.recompute]
        if any(e.candidate in twins and not e.price for e in self.found):
            self.num_pruned += len(every)  # where the same fits at no price nothing runs again, and running it only costs time
            return
        if self._cannot_win(c):
            self.num_pruned += 1
            self.left_out += map(self.evaluator.bounds.lower_bound_s, every)
            return
        if self.progress:
            self.progress(str(c), len(self.space) - len(self.waiting), len(self.space))
        try:
            this = self.evaluator.evaluate(c, self._best_s())
        except PlanError as error:
            self._refuse(error)
            return
        best_s = self._best_s()
        self.num_evaluated += 1
        fits = this.fits(self.evaluator.memory_fraction)
        self.lessons.learn(c, this.estimate_s if fits else TOO_BIG * this.estimate_s)
        self.in_vain = 0 if not self.found or (fits and this.estimate_s < best_s) else self.in_vain + 1
        (self.found if fits else self.too_big).append(this)

    def _refuse(self, error: PlanError) -> None:
        """A candidate on whose mesh a fixed placement is not legal; without fixed placements every candidate has one."""
        if not any(isinstance(value, Hint) or key in ("layout", "tp_plan") for key, value in self.evaluator.fix.items()):
            raise error
        self.num_pruned += 1
        self.refused = self.refused or error

    def _cannot_win(self, c: Candidate) -> bool:
        times = sorted(e.estimate_s for e in self.found)
        return len(times) >= self.top and self.evaluator.bounds.lower_bound_s(c) > min(times[self.top - 1], NEAR * times[0])

    # ---- schedules -----------------------------------------------------------------------------------------------------------------------------------

    def _try_schedules(self) -> None:
        """Other schedules of what was found, and of what did not fit: those first whose busiest rank has least to do, which no schedule goes below."""
        open_ones = sorted((e for e in (*self.found, *self.too_big) if len(self._variants(e.candidate)) > 1), key=lambda e: (e.busy_s, str(e.candidate)))
        in_vain = 0
        for e in open_ones:
            best_s = self._best_s()
            others = [c for c in self._variants(e.candidate)[1:] if c.schedule != "auto"]
            if in_vain >= STUBBORN or e.busy_s >= best_s or (self.found and self._is_late(SEARCH_SHARE)):
                self.left_out += map(self.evaluator.bounds.lower_bound_s, others)
                continue
            self._compare(e, others)
            in_vain = 0 if self._best_s() < best_s else in_vain + 1
        for k, e in enumerate(sorted((e for e in self.found if e.candidate.pp > 1), key=_by_estimate)):
            self._search_order(e, k < NUM_SEARCHED and not self._is_late(SEARCH_SHARE))

    def _compare(self, e: Evaluated, others: Sequence[Candidate]) -> None:
        """Times a layout under other schedules, first at its own price of memory; the fastest that fits is a candidate of its own."""
        if self.progress:
            self.progress(f"schedules of {e.candidate}", self.num_evaluated, self.num_evaluated + len(others))
        fitting: list[Evaluated] = []
        dearer: list[Evaluated] = []
        slower = set[str]()
        for c in others:
            if c.schedule in slower:
                self.left_out.append(self.evaluator.bounds.lower_bound_s(c))
                continue
            this = self.evaluator.evaluate_at(c, e.price, e.exposed)
            self.num_evaluated += 1
            if not this.fits(self.evaluator.memory_fraction):
                slower.add(c.schedule)  # more stages a rank keep more
                dearer.append(this)
                continue
            if any(f.candidate.schedule == c.schedule and f.estimate_s <= this.estimate_s for f in fitting):
                slower.add(c.schedule)  # more stages a rank gain nothing more
            fitting.append(this)
        for d in sorted(dearer, key=self._fitted_s)[:NUM_DEARER]:
            if self._fitted_s(d) < min([e.estimate_s, *(f.estimate_s for f in fitting)]):
                this = self.evaluator.evaluate(d.candidate, e.estimate_s, above=e.price)
                self.num_evaluated += 1
                fitting += [this] if this.fits(self.evaluator.memory_fraction) else []
        fitting.sort(key=_by_estimate)
        is_better = fitting and (e not in self.found or fitting[0].estimate_s < e.estimate_s)
        self.found += fitting[:1] if is_better else []
        self.beaten += [f.floor_s for f in (fitting[1:] if is_better else fitting)]

    def _fitted_s(self, e: Evaluated) -> float:
        """What a draft that does not fit may take where it does."""
        return float(e.estimate_s * (e.memory.peak_bytes / self.evaluator.usable_bytes) ** SQUEEZED)

    def _search_order(self, e: Evaluated, wanted: bool) -> None:
        """The best order for the layout's own times, where it may gain something and is not too long to be searched for."""
        if "schedule" in self.evaluator.fix or e.candidate.schedule == "auto":
            return
        c = replace(e.candidate, schedule="auto", vpp=1)
        if any(e.candidate == c for e in self.found):
            return
        if not wanted or c.num_microbatches * c.pp > LONGEST or e.busy_s > e.estimate_s * (1 - LEAST_GAIN):
            self.left_out.append(self.evaluator.bounds.lower_bound_s(c))
            return
        this = self.evaluator.evaluate_at(c, e.price)
        self.num_evaluated += 1
        if this.fits(self.evaluator.memory_fraction) and this.estimate_s < e.estimate_s:
            self.found.append(this)
        else:
            self.beaten.append(this.floor_s)

    def _try_whole(self) -> None:
        """Schedules of which there are no drafts, for the best layouts where ranks wait: each stands by the bound of its whole plan until it is simulated."""
        graph = self.evaluator.bounds.graph(1)
        for e in sorted((e for e in self.found if e.candidate.pp > 1), key=_by_estimate)[:NUM_SEARCHED]:
            for c in whole_variants(replace(e.candidate, schedule="1f1b", vpp=1), self.evaluator.fix, graph):
                self.num_whole += 1
                is_small = c.num_microbatches * max(1, c.pieces) * len(graph.nodes) <= SMALL
                if e.busy_s > e.estimate_s * (1 - LEAST_WAIT) or not is_small or not self.evaluator.may_fit(c) or self._is_late(SEARCH_SHARE):
                    self.left_out.append(self.evaluator.bounds.lower_bound_s(c))
                    continue
                if self.progress:
                    self.progress(str(c), self.num_evaluated, self.num_evaluated + 1)
                this = self.evaluator.evaluate_at(c, e.price, e.exposed)
                self.num_evaluated += 1
                if this.fits(self.evaluator.memory_fraction) and this.estimate_s < self._best_s():
                    self.found.append(this)
                else:
                    self.beaten.append(this.floor_s)

    # ---- simulation ----------------------------------------------------------------------------------------------------------------------------------

    def _simulate(self, most: int) -> None:
        """The `top` of the best estimates, and more (`most` in all) as long as their estimates promise more than the best simulation; one, where time is up."""
        for e in sorted(self.found, key=_by_estimate):
            if e in self.simulated:
                continue
            if len(self.plans) >= most or (len(self.plans) >= self.top and e.estimate_s >= min(p.predicted["step_s"] for p in self.plans)):
                return
            if self.plans and self._is_late(1.0):
                return
            if self.progress and not self.interrupted:
                self.progress(f"simulating {e.candidate}", len(self.plans), most)
            plan = self.evaluator.simulate(e)
            self.simulated.append(e)
            if plan.predicted["peak_gib"] * GIB <= self.evaluator.memory_fraction * self.evaluator.cluster.devices[0].usable_bytes:
                near = plan.predicted["step_s"] * (1 - FILLED) < min((p.predicted["step_s"] for p in self.plans), default=math.inf)
                self._keep(self.evaluator.filled(e, plan) if near and not self._is_late(1.0) else plan)
                self._keep_safe(e)
            else:
                self.too_big.append(e)

    def _keep(self, plan: Plan) -> None:
        """Keeps a plan, once: candidates at other prices of memory or under other names may come to the same."""
        if not any(decide_alike(plan, p) for p in self.plans):
            self.plans.append(plan)

    def _keep_safe(self, e: Evaluated) -> None:
        """Where the fastest plan is tight, this candidate once more within the share of the memory that is safe to fill."""
        if self.interrupted or self._is_late(1.0) or min(self.plans, key=_by_worth).predicted["fits"] != "tight":
            return
        safe = replace(self.evaluator, memory_fraction=SAFE_FRACTION)
        this = e if e.fits(SAFE_FRACTION) else safe.evaluate(e.candidate, self._best_s(), above=e.price)
        if this.fits(SAFE_FRACTION):
            plan = safe.simulate(this)
            if plan.predicted["fits"] == "yes":
                self._keep(safe.filled(this, plan))

    def _result(self) -> Result:
        best = sorted(self.plans, key=_by_worth)[: self.top]
        step_s = best[0].predicted["step_s"]
        rest = [e.floor_s for e in self.found if e not in self.simulated]
        floor_s = min([*rest, *self.beaten, *self.left_out], default=math.inf)
        gap = max(0.0, 1.0 - floor_s / step_s)
        num = sum(len(self._variants(c)) for c in self.space) + self.num_whole
        told = ({"rank": i, "why": why(p, best), "advice": list(advice(p, self.evaluator.cluster))} for i, p in enumerate(best, 1))
        return Result(
            tuple(replace(p, predicted={**p.predicted, **words}) for p, words in zip(best, told, strict=True)), num,
            self.num_evaluated, self.num_pruned, time.perf_counter() - self.began_s, gap == 0.0, gap, self.interrupted,
        )  # fmt: skip

    def _nothing_fits(self) -> DoesNotFit:
        """With the nearest plans, and what would make room."""
        smallest = sorted(self.space, key=lambda c: (self.evaluator.footprint.least_bytes(c), str(c)))
        near = sorted(self.too_big or map(self.evaluator.evaluate, smallest[:3]), key=lambda e: (e.memory.peak_bytes, str(e.candidate)))[:3]
        cluster = self.evaluator.cluster
        usable = cluster.devices[0].usable_bytes * self.evaluator.memory_fraction
        told = "; ".join(f"{e.candidate}: {nbytes(e.memory.peak_bytes)}" for e in near)
        ways = ways_out(self.evaluator)
        return DoesNotFit(
            f"`{self.evaluator.bounds.model.name}` does not fit on {cluster.num_devices} x {cluster.devices[0].name}: {nbytes(usable)} may be filled on "
            f"each ({self.evaluator.memory_fraction:g} of what is usable), {nbytes(near[0].memory.peak_bytes - usable)} are missing. Nearest: {told}. "
            f"Ways out: {'; '.join(ways) or 'more devices, or a smaller model'}",
            nearest=[self._too_big(e, usable) for e in near], ways_out=ways,
        )  # fmt: skip

    def _too_big(self, e: Evaluated, usable: float) -> Plan:
        """Its plan, simulated as if it fitted; the reason says how much is missing."""
        plan = self.evaluator.simulate(e)
        return replace(plan, predicted={**plan.predicted, "fits": "no", "why": f"does not fit: {nbytes(e.memory.peak_bytes - usable)} are missing"})
