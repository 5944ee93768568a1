"""Orders as text, and what is wrong with them: dropped, doubled, swapped, cyclic and crossed ones are refused with the sentence that names them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from ir.errors import Deadlock, HeadraceError, PlanError
from planner.schedules import SCHEDULES, Orders, Slot, schedule
from planner.schedules.own import own_schedule
from planner.schedules.proof import SENDS, check_orders, program_of, with_messages
from planner.schedules.text import Message, Table, passes, read, write

CASES = [(s.name, p, m) for s in SCHEDULES.values() for p, m in ((1, 2), (2, 4), (4, 8), (3, 6), (4, 4), (4, 3)) if not s.refuse(p, m, s.num_chunks())]


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_every_schedule_is_proved_and_reads_back_as_text(name: str, p: int, m: int) -> None:
    s = schedule(name)
    orders = s.orders(p, m)
    assert read(write(orders)) == orders == check_orders(orders, lambda stage: s.rank_of(stage, p), m * s.pieces, copies=s.copies, pieces=s.pieces)
    table = with_messages(orders, s.copies, s.pieces)
    assert read(write(table)) == table
    assert passes(table) == orders
    for sends in SENDS:
        assert check_orders(table, None, m * s.pieces, sends, s.copies, s.pieces) == orders


def test_what_pytorch_writes_is_read_and_its_pairs_are_two_passes() -> None:
    table = read("0UNSHARD,0F0,,0SEND_F0,0F1\n1RECV_F0, 1F0 ,(1F1;1B0)OVERLAP_F_B,1REDUCE_GRAD\n\n")
    assert write(table) == "0UNSHARD,0F0,0SEND_F0,0F1\n1RECV_F0,1F0,1F1,1B0,1REDUCE_GRAD\n"
    for text, wrong in (("0F0\n1X0", "line 2: `1X0` is no action"), ("0F", "line 1: `0F` is no action"), ("\n", "no action"), ("F0", "as in 2F0")):
        with pytest.raises(PlanError, match=wrong):
            read(text)


def test_a_users_table_is_a_schedule_for_its_size() -> None:
    mine = own_schedule("mine", schedule("v-half").orders(4, 8))
    assert mine.orders(4, 8) == schedule("v-half").orders(4, 8)
    assert (mine.num_chunks(), mine.splits, [mine.rank_of(s, 4) for s in range(8)]) == (2, True, [0, 1, 2, 3, 3, 2, 1, 0])
    assert [mine.stash(r, 4, 8) for r in range(4)] == [mine.memory(r, 4, 8, 2) for r in range(4)] == [3.0] * 4
    for p, m, wrong in ((4, 9, "its table is for 8 microbatches on 4 ranks; nearest legal are 8"), (2, 8, "choose another number of ranks")):
        with pytest.raises(PlanError, match=wrong):
            mine.orders(p, m)
    for text, wrong in (("0UNSHARD", "the table runs nothing"), ("0F0,1F0,3F0,3B0,1B0,0B0\n2F0,2B0", "gives the ranks 0: 3, 1: 1 stages")):
        with pytest.raises(HeadraceError, match=wrong):
            own_schedule("mine", read(text))
    with pytest.raises(Deadlock, match="would stand still"):
        own_schedule("mine", read("0F0,0B0\n1B0,1F0"))


# ---- forty ways to spoil an order ----------------------------------------------------------------------------------------------------------------------

VICTIMS = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "interleaved-zb", "zb-v", "dualpipe-v")


def dropped(orders: Orders, rng: random.Random) -> tuple[Table, str]:
    rank = rng.randrange(len(orders))
    lost = rng.choice(orders[rank])
    return replace_row(orders, rank, [s for s in orders[rank] if s != lost]), f"no rank runs {lost};"


def doubled(orders: Orders, rng: random.Random) -> tuple[Table, str]:
    rank, onto = rng.randrange(len(orders)), rng.randrange(len(orders))
    twice = rng.choice(orders[rank])
    row = list(orders[onto])
    row.insert(rng.randrange(len(row) + 1), twice)
    return replace_row(orders, onto, row), f"{twice} stands twice: as number \\d+ of rank \\d+ and as number \\d+ of rank \\d+"


def swapped(orders: Orders, rng: random.Random) -> tuple[Table, str]:
    """A backward before its own forward, or a weight gradient before its input gradient."""
    rank = rng.randrange(len(orders))
    row = list(orders[rank])
    late = rng.choice([s for s in row if s.kind != "F"])
    early = next(s for s in row if s[::2] == late[::2] and s.kind == ("I" if late.kind == "W" else "F"))
    i, j = row.index(early), row.index(late)
    row[i], row[j] = late, early
    return replace_row(orders, rank, row), f"would stand still.*{late} \\(rank {rank}, compute\\) waits: .* has no item   <- written by {early}\n"


def cyclic(orders: Orders, rng: random.Random) -> tuple[Table, str]:
    """A rank forwards j after it has the gradient of i, for which its neighbour first wants to forward j. Where all forwards come first: one moved behind."""
    rank = rng.randrange(len(orders) - 1)
    here, there = list(orders[rank]), list(orders[rank + 1])
    last = [s for s in here if s.kind == "F"][-1]
    if all(s.kind == "F" for s in here[: here.index(last)]):
        back = next(s for s in here if s.kind != "F")
        last = next(s for s in reversed(here) if s.kind == "F" and s.microbatch != back.microbatch)
        here.remove(last)
        here.insert(here.index(back) + 1, last)
        names = f"would stand still(?=.*{back} )(?=.*{last} )(?=.*{Slot(last.stage + 1, 'F', last.microbatch)} )"
        return replace_row(orders, rank, here), names
    stage = rank
    back = next(s for s in here if s.stage == stage and s.kind in "IB")
    later = next(s for s in here[here.index(back) :] if s.stage == stage and s.kind == "F")
    give = next(s for s in there if s.stage == stage + 1 and s.kind in "IB" and s.microbatch == back.microbatch)
    take = Slot(stage + 1, "F", later.microbatch)
    there.remove(take)
    there.insert(there.index(give), take)
    names = f"would stand still(?=.*{back} )(?=.*{later} )(?=.*{give} )(?=.*{take} )"
    return replace_row(orders, rank + 1, there), names


def crossed(orders: Orders, rng: random.Random) -> tuple[Table, str]:
    """Two messages of one neighbour, received in another order than it sends them."""
    table = with_messages(orders)
    rank = rng.randrange(1, len(orders))
    row = list(table[rank])
    i, j = sorted(rng.sample([i for i, a in enumerate(row) if a.kind == "RECV_F" and a.stage == rank], 2))
    row[i], row[j] = row[j], row[i]
    sent, got = Message(rank - 1, "SEND_F", row[j].microbatch), row[i]
    sentence = f"messages are not in the same order on both sides: .*rank {rank - 1} .p2p. comes to `{sent}` .*rank {rank} .p2p. comes to `{got}` "
    return replace_row(table, rank, row), sentence


def replace_row(table: Table | Orders, rank: int, row: list[object]) -> Table:
    return tuple(tuple(row) if r == rank else tuple(old) for r, old in enumerate(table))  # type: ignore[arg-type]


SPOILERS: tuple[Callable[[Orders, random.Random], tuple[Table, str]], ...] = (dropped, doubled, swapped, cyclic, crossed)


@pytest.mark.parametrize("name", VICTIMS)
@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_spoilt_order_is_refused_with_the_sentence_that_names_it(spoil: Callable[[Orders, random.Random], tuple[Table, str]], name: str) -> None:
    p, m = 4, 8
    s = schedule(name)
    table, sentence = spoil(s.orders(p, m), random.Random(f"{spoil.__name__} {name}"))
    with pytest.raises(HeadraceError) as error:
        check_orders(table, lambda stage: s.rank_of(stage, p), m)
    assert re.search(sentence, str(error.value), re.DOTALL), f"{error.value}\n\nsays nothing of: {sentence}"
    assert isinstance(error.value, PlanError if spoil in (dropped, doubled) else Deadlock)


def test_a_pass_on_the_wrong_rank_one_too_many_and_a_message_alone_are_named() -> None:
    for text, m, wrong in (
        ("0F0,0B0,1F0\n1B0", 1, "1B0 stands on rank 1; stage 1 lies on rank 0"),
        ("0F0,0B0,0F1,0B1", 1, "rank 0 runs 0F1; there are 1 microbatches"),
        ("0F0,0I0,0B0,0W0", 1, "stage 0 runs microbatch 0 as F, I, W, B; B is the whole backward"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", 1, "and 1SEND_B0 is not among them; list every send and receive, or none"),
        ("0F0,0SEND_B0,0B0", 1, "rank 0 lists 0SEND_B0, which no pass waits for"),
        ("0F0,1RECV_F0,0B0\n1F0,1B0", 1, "1RECV_F0 stands on rank 0; it belongs on rank 1"),
        ("0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", 1, "0SEND_F0 stands twice on rank 0"),
    ):
        with pytest.raises(PlanError, match=re.escape(wrong)):
            check_orders(read(text), None, m)
    with pytest.raises(PlanError, match="microbatch 0 runs through copies 0, 1 of the pipeline"):
        check_orders(read("0F0,1B0\n1F0,0B0"), None, 1, copies=2)
    with pytest.raises(PlanError, match="stage 1 lies on rank 0"):
        check_orders(read("0F0,0B0\n1F0,1B0"), lambda stage: 0, 1)
    with pytest.raises(PlanError, match="sends are stream, blocking, buffered, not `eager`"):
        program_of(read("0F0,0B0"), "eager")


# ---- orders that are known to hang ---------------------------------------------------------------------------------------------------------------------


def eager(orders: Orders, num_stages: int) -> Table:
    """Every rank by itself: it receives right before a pass and sends right after it, whatever the others do."""
    rank_of = {s.stage: rank for rank, order in enumerate(orders) for s in order}
    rows = []
    for rank, order in enumerate(orders):
        row: list[Slot | Message] = []
        for slot in order:
            letter, src, dst = ("F", slot.stage - 1, slot.stage + 1) if slot.kind == "F" else ("B", slot.stage + 1, slot.stage - 1)
            if slot.kind != "W" and 0 <= src < num_stages and rank_of[src] != rank:
                row.append(Message(slot.stage, f"RECV_{letter}", slot.microbatch))
            row.append(slot)
            if slot.kind != "W" and 0 <= dst < num_stages and rank_of[dst] != rank:
                row.append(Message(slot.stage, f"SEND_{letter}", slot.microbatch))
        rows.append(tuple(row))
    return tuple(rows)


CROSS, CYCLE = "messages are not in the same order on both sides", "would stand still: these wait for each other"
HANGS = {
    # NVIDIA/nccl 479: both neighbours send first. Two stages a rank: both are peers in both directions (NVIDIA/Megatron-LM 750).
    "both send first": (schedule("interleaved").orders(2, 2, 2), CROSS),
    # pytorch/pytorch 126419: in 1F1B a stage sends its gradient before it receives the next microbatch, which its neighbour sends first.
    "gradient against activation": (schedule("1f1b").orders(2, 4), CROSS),
    # pytorch/pytorch 172668: 0SEND_F before 2RECV_B on one rank, 3SEND_B before 1RECV_F on the other.
    "receives moved late": (passes(read("0F0,2F0,0F1,2B0,2F1,2B1,0B0,0B1\n1F0,3F0,3B0,1F1,1B0,3F1,3B1,1B1")), CROSS),
    # pytorch/pytorch 127332, NVIDIA/Megatron-LM 5100: everybody round the ring sends before it receives.
    "round the ring": (schedule("looped-bfs").orders(3, 3, 2), CYCLE),
}


@pytest.mark.parametrize("what", HANGS)
def test_messages_in_an_order_that_is_known_to_hang_are_refused_before_they_run(what: str) -> None:
    orders, sentence = HANGS[what]
    m = 1 + max(s.microbatch for order in orders for s in order)
    table = eager(orders, 1 + max(s.stage for order in orders for s in order))
    for sends in ("stream", "blocking"):
        with pytest.raises(Deadlock, match=sentence):
            check_orders(table, None, m, sends)
    assert check_orders(table, None, m, "buffered") == orders
    for sends in SENDS:
        assert check_orders(with_messages(orders), None, m, sends) == orders


def test_fewer_microbatches_than_a_fixed_warm_up_forwards_are_named() -> None:
    """AMD-AGI/Primus 1003: a table with backwards of microbatches that were never forwarded."""
    with pytest.raises(PlanError, match="no rank runs 0F2; every stage runs F and B, or F, I and W, of every microbatch once"):
        check_orders(read("0F0,0F1,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"), None, 3)
