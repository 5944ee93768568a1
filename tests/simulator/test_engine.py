"""The event simulation: collectives meet, cores and links are shared, the same bytes come out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.errors import Deadlock
from ir.program import Program
from ir.work import Work
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.fold import fold
from tests.programs import Builder, pipeline, with_credits
from tests.simulator.test_cost import threads

H100 = CostModel(load_cluster("2x8xH100@ib400"))


def collective(kind: str, group: tuple[int, ...], nbytes: float = 1e8) -> Work:
    return Work("collective", kind, "float32", nbytes=nbytes, group=group)


def gemm(m: int) -> Work:
    return Work("compute", "linear", "float32", 2.0 * m * 1024 * 1024, 4.0 * (2 * m * 1024 + 1024 * 1024), (1, m, 1024, 1024))


def test_members_of_a_collective_start_together_and_the_slowest_decides() -> None:
    b = Builder(1)
    for rank, m in ((0, 1024), (1, 8192)):
        b.register(f"y{rank}", rank)
        b.register(f"z{rank}", rank)
        b.actor(f"F{rank}", rank, "compute", writes=(f"y{rank}",), work=gemm(m))
        b.actor(f"sum{rank}", rank, "comm.tp", (f"y{rank}",), (f"z{rank}",), work=collective("all_reduce", (0, 1)), channel="sum")
    program = b.build("meet").check()
    spans = {s.actor: s for s in simulate(program, H100, steps=1).spans}
    assert spans["sum0"].start_s == spans["sum1"].start_s == spans["F1"].end_s > spans["F0"].end_s
    assert spans["sum0"].end_s - spans["sum0"].start_s == pytest.approx(H100.collective_s("all_reduce", 1e8, (0, 1)))
    assert spans["sum0"].end_s == spans["sum1"].end_s


def test_communication_hides_behind_compute_of_another_queue() -> None:
    b = Builder(4)
    for r in (0, 1):
        b.register(f"y{r}", r, credits=4)
        b.actor(f"F{r}", r, "compute", writes=(f"y{r}",), work=gemm(8192))
        b.actor(f"sum{r}", r, "comm.tp", (f"y{r}",), work=collective("all_gather", (0, 1)), channel="sum")
    program = b.build("hide").check()
    timeline = simulate(program, H100, steps=1)
    compute, gather = (sum(s.end_s - s.start_s for s in timeline.spans if s.actor == name) for name in ("F0", "sum0"))
    assert max(s.end_s for s in timeline.spans) < compute + gather
    assert max(s.end_s for s in timeline.spans) >= compute + gather / 4


def on_threads(num: int, nbytes: float = 8e6) -> Program:
    """One kernel on each of `num` ranks, no communication."""
    b = Builder(1)
    for rank in range(num):
        b.actor(f"F{rank}", rank, "compute", work=Work("compute", "relu", "float32", nbytes=nbytes))
    return b.build("threads").check()


def test_more_queues_than_cores_slow_down() -> None:
    ends = [max(s.end_s for s in simulate(on_threads(num), CostModel(threads(4, cores=2)), steps=1).spans) for num in (1, 2, 3, 4)]
    alone = 1e-3 + 2e-6 + 6e-6 + 2e-5
    assert ends == pytest.approx([alone, alone, 1.5 * alone, 2 * alone])


def test_a_collective_of_threads_occupies_cores() -> None:
    def run(num_cores: int) -> float:
        b = Builder(1)
        for rank in (0, 1):
            b.actor(f"F{rank}", rank, "compute", work=Work("compute", "relu", "float32", nbytes=8e6))
            b.actor(f"sum{rank}", rank, "comm.dp", work=collective("all_gather", (0, 1), 8e6), channel="sum")
        return max(s.end_s for s in simulate(b.build("busy").check(), CostModel(threads(2, num_cores)), steps=1).spans)

    copy = 2e-5 + 8e6 / 4e9
    assert run(4) == pytest.approx(copy)
    assert run(2) > 1.4 * copy


def test_a_firing_that_adds_takes_longer_than_the_first() -> None:
    b = Builder(3)
    b.register("g", 0, "step", memory="gradient")
    b.actor("dw", 0, "compute", writes=("g",), work=gemm(256))
    b.registers[-1] = replace(b.registers[-1], nbytes=8_000_000)
    cost = CostModel(threads())
    spans = simulate(b.build("add").check(), cost, steps=2).spans
    lengths = [s.end_s - s.start_s for s in spans]
    assert lengths[:3] == pytest.approx([lengths[0], lengths[0] + 3e-3 + 2e-6, lengths[0] + 3e-3 + 2e-6])
    assert lengths[3:] == pytest.approx(lengths[:3])


def two_transfers() -> Program:
    """Ranks 0 and 1 of one node each send to a rank of another, over one NIC; the second starts when the first is half done or later."""
    b = Builder(1)
    for src, dst in ((0, 8), (1, 9)):
        b.register(f"x{src}", src, initial=0)
        b.register(f"y{dst}", dst)
        b.actor(f"F{src}", src, "compute", writes=(f"x{src}",), work=Work("compute", "gelu", "float32", nbytes=1e6))
        for kind, rank, uses in (("send", src, {"reads": (f"x{src}",)}), ("recv", dst, {"writes": (f"y{dst}",)})):
            b.actor(f"{kind}{src}", rank, f"p2p.{kind}", work=Work(kind, kind, "float32", nbytes=1e9, group=(src, dst)), channel=f"hop{src}", **uses)
    return b.build("transfers").check()


def test_transfers_that_meet_share_the_nic() -> None:
    program = two_transfers()
    nic = next(k for k in H100.cluster.links if k.kind == "ib").bytes_per_s
    shared = {s.actor: s.end_s - s.start_s for s in simulate(program, H100, steps=1, share_links=True).spans}
    assert shared["send0"] == pytest.approx(2e9 / nic, rel=1e-3)
    one = fold(program, (0, 8))
    alone = {s.actor: s.end_s - s.start_s for s in simulate(one, H100, steps=1, share_links=True).spans}
    assert alone["send0"] == pytest.approx(1e9 / nic, rel=1e-3)
    eight = {s.actor: s.end_s - s.start_s for s in simulate(one, H100, steps=1).spans}
    assert eight["send0"] == pytest.approx(8e9 / nic, rel=1e-3)


def test_the_same_input_gives_the_same_bytes() -> None:
    program = pipeline(4, 6)
    assert simulate(program, H100).dumps() == simulate(program, CostModel(load_cluster("2x8xH100@ib400"))).dumps()
    assert simulate(program, H100).meta["program"] == program.fingerprint


def test_queues_run_ahead_over_steps() -> None:
    program = pipeline(2, 3, "gpipe")
    one, three = (simulate(program, H100, steps=n) for n in (1, 3))
    assert len(three.spans) == 3 * len(one.spans)
    assert three.step_s <= one.step_s
    assert three.steps == (0, 1, 2)


def test_a_program_that_cannot_live_says_why() -> None:
    program = with_credits(pipeline(3, 4, "gpipe"), {"stash0": 1})
    with pytest.raises(Deadlock, match="stash0"):
        simulate(program, H100)


def test_only_the_price_of_its_work_decides() -> None:
    program = pipeline(2, 2)
    renamed = replace(program, name="other", actors=tuple(replace(a, origin="elsewhere", layer=7) for a in program.actors))
    assert [s[1:] for s in simulate(program, H100).spans] == [s[1:] for s in simulate(renamed, H100).spans]
