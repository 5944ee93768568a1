"""Published tables as runs: every bundled row is read, and what a row lacks is told."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ir.errors import InputError
from planner.recipes.estimate import Estimator
from planner.recipes.rows import Entry, read_runs
from planner.recipes.run import Run, Shape
from planner.recipes.study import fitted
from planner.recipes.validate import bundled_entries, validate

HEAD = "id,family,release,machine,model,arch,layers,hidden,heads,seq,vocab,gpu,n_gpus,inter,tp,pp,dp,mbs,gbs,recompute,precision,schedule"
ROW = "a,mine,Megatron-LM 2022,here,small,gpt,24,1024,16,1024,51200,A100-SXM-80GB,8,8x HDR IB 200Gb/s per node,2,2,2,4,32,full,fp16,1f1b"
ODD = (
    "",
    "0",
    "-1",
    "3",
    "1e9",
    "1e400",
    "nan",
    "inf",
    "1,024",
    " 8 ",
    "9" * 30,
    "h100-sxm",
    "TPUv4",
    "ZB-V",
    "dualpipe",
    "FP8",
    "moe",
    "moe-mla",
    "\x00",
    "\n",
)
ESTIMATOR = Estimator()


@pytest.fixture(scope="module")
def entries() -> tuple[Entry, ...]:
    return bundled_entries()


def table(folder: Path, *rows: str, head: str = HEAD) -> Path:
    path = folder / "runs.csv"
    path.write_text("\n".join((head, *rows)) + "\n")
    return path


def one(folder: Path, row: str, head: str = HEAD) -> Entry:
    return read_runs(table(folder, row, head=head))[0]


def changed(folder: Path, column: str, value: str) -> Entry:
    cells = dict(zip(HEAD.split(","), ROW.split(","), strict=True)) | {column: value}
    return one(folder, ",".join(cells.values()), ",".join(cells))


def test_every_bundled_row_is_a_measured_run(entries: tuple[Entry, ...]) -> None:
    assert len(entries) > 1500
    assert len({e.id for e in entries}) == len(entries)
    assert not [e for e in entries if e.run is None or not e.run.measured_s or not e.run.source]


def test_the_first_and_last_stage_hold_a_layer_less_where_that_alone_divides(entries: tuple[Entry, ...]) -> None:
    runs = {e.id: e.run for e in entries if e.run is not None}
    assert runs["zb-t4-1F1B-1.5B-32"].short_ends
    assert not runs["vtrain-m-2"].short_ends


def test_a_row_says_how_it_was_run(tmp_path: Path) -> None:
    run = one(tmp_path, ROW).run
    assert run is not None
    assert (run.num_microbatches, run.nic, run.recompute, run.schedule, run.shape.ffn, run.measured_s) == (4, "ib200x8", "full", "1f1b", 4096, None)
    assert run.assumed == ("width of the MLP not given: 4096", "virtual stages not given: 1 assumed")


@pytest.mark.parametrize(
    ("column", "value", "seconds"),
    [("iter_time_s", "2.5", 2.5), ("samples_per_s", "16", 2.0), ("tokens_per_s_per_gpu", "2048", 2.0)],
)  # fmt: skip
def test_whichever_figure_is_given_is_the_seconds_of_a_step(tmp_path: Path, column: str, value: str, seconds: float) -> None:
    run = changed(tmp_path, column, value).run
    assert run is not None
    assert run.measured_s == pytest.approx(seconds)


def test_flops_are_counted_as_their_source_counts_them(entries: tuple[Entry, ...], tmp_path: Path) -> None:
    run = next(e.run for e in entries if e.id == "mlm21-t1-9")
    assert run is not None
    assert run.measured_s == pytest.approx(102.63, rel=1e-3)


@pytest.mark.parametrize(("release", "mbs"), [("Megatron-LM 2022", 1), ("torchtitan 2024-12", 4)])
def test_a_microbatch_that_is_not_given_is_the_usual_one_of_the_release(tmp_path: Path, release: str, mbs: int) -> None:
    """A rank's 16 sequences in microbatches of one, or as many microbatches as stages where that is the release's way; what was assumed is told."""
    cells = dict(zip(HEAD.split(","), ROW.split(","), strict=True)) | {"mbs": "", "release": release, "tp": "1", "pp": "4"}
    run = one(tmp_path, ",".join(cells.values()), ",".join(cells)).run
    assert run is not None
    assert run.mbs == mbs
    assert f"microbatch size not given: {mbs} assumed" in run.assumed


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("n_gpus", "7", "= 8, but 7 GPUs"), ("gbs", "30", "not whole microbatches"), ("layers", "many", "`layers` is `many`"), ("tp", "", "`tp` is not given"),
        ("arch", "t5", "`arch` is `t5`"), ("recompute", "now and then", "`recompute` is"), ("zero", "two", "`zero` is `two`"), ("vocab", "many", "`vocab` is"),
        ("seq_parallel", "maybe", "0 or 1"), ("hidden", "1e9", "whole number"), ("hidden", "9" * 12, "no more than"),
        ("vpp", "64", "128 stages, but 24 layers"),
        ("iter_time_s", "nan", "finite"), ("iter_time_s", "soon", "no number"),
    ],
)  # fmt: skip
def test_a_row_that_contradicts_itself_has_a_reason_and_no_run(tmp_path: Path, column: str, value: str, told: str) -> None:
    entry = changed(tmp_path, column, value)
    assert entry.run is None
    assert told in entry.reason
    assert "`a`" in entry.reason


def test_a_precision_that_nothing_computes_in_is_told(tmp_path: Path) -> None:
    assert "precision `int3` is not known" in changed(tmp_path, "precision", "int3").reason


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"columns .* are missing"):
        read_runs(table(tmp_path, "1,2", head="x,y"))
    with pytest.raises(InputError, match="cannot be read"):
        read_runs(tmp_path / "nothing.csv")


def test_a_missing_column_is_named_of_the_schema_that_the_table_is_nearest_to(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r": columns schedule are missing"):
        read_runs(table(tmp_path, ROW, head=HEAD.replace(",schedule", "")))


def test_spelling_does_not_matter(tmp_path: Path) -> None:
    """Capitals, blanks, quotes, a byte order mark, whole numbers as decimals, other names of the same GPU, more cells than columns, fewer cells."""
    plain = one(tmp_path, ROW).run
    path = table(tmp_path, ROW.replace(",gpt,24,", ',GPT,"24.0", ').replace("full", "Full").replace("1f1b", "1F1B") + ",more,cells", head=HEAD.upper())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_runs(path)[0].run == plain
    for spelled in ("a100-sxm-80gb", "A100", "A100-80GB"):
        found = changed(tmp_path, "gpu", spelled).run
        assert found is not None
        assert plain is not None
        assert fitted(found) == fitted(plain)
    assert "`hidden` is not given" in one(tmp_path, "a,mine,Megatron-LM 2022").reason


def test_an_alias_of_a_gpu_has_the_shares_that_were_fitted_for_it(tmp_path: Path) -> None:
    measured = {"release": "Megatron-DeepSpeed 2022", "machine": "a100-1node (vTrain)"}
    cells = dict(zip(HEAD.split(","), ROW.split(","), strict=True)) | measured
    runs = [one(tmp_path, ",".join((cells | {"gpu": gpu}).values())).run for gpu in ("A100-SXM-80GB", "a100-80gb")]
    assert {fitted(run).basis.split(" on ")[0] for run in runs if run is not None} == {"cross-validated"}


def test_a_release_of_which_nothing_is_known_is_taken_as_the_usual_one(tmp_path: Path) -> None:
    run = changed(tmp_path, "release", "Colossal-AI 0.4").run
    assert run is not None
    assert run.release == "Megatron-Core"
    assert "release `Colossal-AI 0.4` is not known: taken as Megatron-Core" in run.assumed


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(HEAD.split(",")), st.sampled_from(ODD) | st.text(max_size=8)), max_size=3))
def test_every_row_has_seconds_with_their_band_or_a_reason(tmp_path: Path, changes: list[tuple[str, str]]) -> None:
    cells = dict(zip(HEAD.split(","), ROW.split(","), strict=True)) | dict(changes)
    with (path := tmp_path / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows((cells, cells.values(), ROW.split(",")))
    odd, plain = validate(read_runs(path), ESTIMATOR)["rows"]
    assert plain["covered"]
    json.dumps(odd, allow_nan=False)
    if odd["covered"]:
        assert 0 < odd["band"]["low_s"] < odd["predicted"] < odd["band"]["high_s"]
        assert odd["band"]["basis"]
    else:
        assert odd["reason"]
        assert odd["predicted"] is None


def test_rows_of_one_name_and_tables_without_a_run(tmp_path: Path) -> None:
    rows = validate(read_runs(table(tmp_path, ROW, ROW.replace(",32,full", ",64,full"))), ESTIMATOR)["rows"]
    assert [r["id"] for r in rows] == ["a", "a"]
    assert rows[1]["predicted"] > 1.5 * rows[0]["predicted"]
    assert validate(read_runs(table(tmp_path)), ESTIMATOR) == {"rows": [], "families": []}
    (row,) = validate(read_runs(table(tmp_path, "a,mine")), ESTIMATOR)["rows"]
    assert not row["covered"]


def test_parameters_are_those_of_the_model() -> None:
    llama = Shape("llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, gated=True, tied=False)
    deepseek = Shape(
        "moe-mla", layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=128, ffn=18432, vocab=129280, gated=True, tied=False, experts=256, topk=8,
        moe_ffn=2048, shared_experts=1, dense_layers=3, q_rank=1536, kv_rank=512, rope_dim=64,
    )  # fmt: skip
    assert llama.num_params == pytest.approx(8.03e9, rel=1e-3)
    assert deepseek.num_params == pytest.approx(671e9, rel=2e-3)


def test_a_run_of_no_whole_microbatches_is_refused() -> None:
    shape = Shape("gpt", 2, 64, 4, 4, 16, 256, 1000)
    with pytest.raises(InputError, match="ep 3 does not divide"):
        Run("r", "", "", shape, 64, "A100", 4, dp=4, ep=3, gbs=4).check()
