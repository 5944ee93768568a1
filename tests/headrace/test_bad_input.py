"""Bad input: exit code 2, one clear message on standard error, no traceback, nothing on standard output, nothing half-written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main

GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": None}
LLAMA = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, local_document: Mapping[str, Any]) -> Path:
    """A folder with a small config, a plan, its program and a timeline, all good."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "local.json").write_text(json.dumps(local_document))
    (folder / "config.json").write_text(json.dumps(GPT2))
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    (folder / "text.txt").write_text("the quick brown fox\n" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_LOCAL", str(folder / "local.json"))
        patch.chdir(folder)
        assert main(["plan", "config.json", "local", "--batch", "4", "--seq", "16", "-o", "plan.json"]) == 0
        assert main(["lower", "plan.json", "-o", "program.json"]) == 0
        assert main(["simulate", "config.json", "local", "--plan", "plan.json", "--timeline", "timeline.json"]) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `made` to spoil, as the working folder. Its plan names the config in `made`."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("HEADRACE_LOCAL", str(tmp_path / "local.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


Spoil = Callable[[Path], object]


def nothing(folder: Path) -> None:
    pass


def write(name: str, text: str | bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def cut(name: str) -> Spoil:
    return lambda folder: (folder / name).write_text((folder / name).read_text()[:-30])


def change(name: str, *path_and_value: Any) -> Spoil:
    """Sets one value deep in a JSON document; `name` may be `source>target`."""
    *path, value = path_and_value
    source, _, target = name.partition(">")

    def spoil(folder: Path) -> None:
        data = json.loads((folder / source).read_text())
        at = data
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        (folder / (target or source)).write_text(json.dumps(data))

    return spoil


def drop_links(folder: Path) -> None:
    change("local.json", "links", [])(folder)


PLAN = ["plan", "config.json", "local", "--batch", "4", "--seq", "16", "-o", "out.json"]
H100 = ["1x8xH100-SXM", "--batch", "16", "--seq", "16", "-o", "out.json"]

CASES: dict[str, tuple[Spoil, list[str], str]] = {
    # documents that are missing, empty, cut off or broken
    **{f"{verb} missing": (nothing, [verb, "nowhere.json", *rest], "nowhere.json` is not there") for verb, rest in
       (("check", []), ("explain", []), ("lower", ["-o", "out.json"]), ("run", []), ("diff", ["timeline.json"]))},
    **{f"{verb} empty": (write(f"{verb}.json", ""), [verb, f"{verb}.json", *rest], "is empty") for verb, rest in
       (("check", []), ("explain", []), ("lower", ["-o", "out.json"]), ("run", []), ("diff", ["timeline.json"]))},
    "plan cut off": (cut("plan.json"), ["check", "plan.json"], "cut off"),
    "program cut off": (cut("program.json"), ["run", "program.json"], "cut off|line 1"),
    "timeline cut off": (cut("timeline.json"), ["diff", "timeline.json", "timeline.json"], "timeline.json"),
    "plan no JSON": (write("plan.json", "tp=2"), ["run", "plan.json"], "line 1, column 1"),
    "plan binary": (write("plan.json", b"\x80\x02\xff"), ["run", "plan.json"], "UTF-8"),
    "plan a list": (write("plan.json", "[]"), ["run", "plan.json"], "JSON list"),
    "plan a folder": (lambda folder: (folder / "plan").mkdir(), ["run", "plan"], "cannot be read"),
    "plan another kind": (nothing, ["lower", "program.json", "-o", "out.json"], "is a program; a plan was expected"),
    "timeline another kind": (nothing, ["diff", "plan.json", "timeline.json"], "a timeline was expected"),
    "plan without a key": (change("plan.json", "stages", None), ["run", "plan.json"], "incomplete or damaged|stages"),
    "config missing": (nothing, ["plan", "nowhere/config.json", *PLAN[2:]], "nowhere/config.json"),
    "config empty": (write("config.json", ""), PLAN, "config.json` is empty"),
    "config cut off": (cut("config.json"), PLAN, "config.json"),
    "cluster missing": (nothing, ["plan", "config.json", "nowhere.json"], "nowhere.json"),
    "cluster empty": (write("c.json", ""), ["plan", "config.json", "c.json"], "c.json is empty"),
    "cluster cut off": (lambda f: (f / "c.json").write_text((f / "local.json").read_text()[:-30]), ["plan", "config.json", "c.json"], "c.json"),
    "local damaged": (cut("local.json"), PLAN, "headrace measure"),
    # names that are not known
    "unknown verb": (nothing, ["plna", "gpt2", "local"], "did you mean plan"),
    "unknown option": (nothing, [*PLAN, "--bacth", "4"], "did you mean --batch"),
    "unknown model": (nothing, ["plan", "gtp2", *PLAN[2:]], "gpt2"),
    "unknown cluster": (nothing, ["plan", "config.json", "4x8xH10-SXM"], "H100-SXM"),
    "unknown machine": (nothing, ["plan", "config.json", "dgx-h10"], "dgx-h100"),
    "unknown dtype": (nothing, [*PLAN, "--dtype", "float31"], "float32"),
    "unknown optimizer": (nothing, [*PLAN, "--optimizer", "adam"], "adamw"),
    "unknown fix key": (nothing, [*PLAN, "--fix", "tpp=2"], "did you mean (tp|pp)"),
    "unknown schedule": (nothing, [*PLAN, "--fix", "schedule=1f2b"], "1f1b"),
    "unknown backend": (nothing, ["run", "plan.json", "--backend", "numpi"], "numpy"),
    "hub id": (nothing, ["plan", "meta-llama/Meta-Llama-3-8B", *PLAN[2:]], "config.json"),
    "auto_map": (change("config.json", "auto_map", {"AutoModel": "x.Y"}), PLAN, "auto_map"),
    "unknown family": (change("config.json", "model_type", "mamba"), PLAN, "mamba.*gpt2"),
    # layouts that cannot be
    "tp against heads": (nothing, ["plan", "config.json", *H100, "--fix", "tp=8"], "tp=8.*4 heads.*legal tp are 1, 2, 4"),
    "tp against KV heads": (nothing, ["plan", "llama.json", *H100, "--fix", "tp=4"], "2 KV heads.*legal tp are 1, 2"),
    "contradictory fix": (nothing, ["plan", "config.json", *H100, "--fix", "dp=4,tp=2,pp=2"], "16.*8"),
    "fix beyond the devices": (nothing, ["plan", "config.json", *H100, "--fix", "tp=2,pp=16"], "8"),
    "fix twice": (nothing, [*PLAN, "--fix", "tp=2,tp=1"], "twice"),
    "fix no number": (nothing, [*PLAN, "--fix", "tp=two"], "tp=two"),
    "pp beyond the layers": (nothing, ["plan", "config.json", "1x8xH100-SXM", "--batch", "16", "--seq", "16", "--fix", "pp=8"], "pp can be 1 to 2"),
    "batch not divisible by dp": (nothing, ["plan", "config.json", "1x8xH100-SXM", "--batch", "7", "--seq", "16", "--fix", "dp=8"], "7.*8"),
    "batch not divisible by mbs": (nothing, ["plan", "config.json", "1x8xH100-SXM", "--batch", "12", "--seq", "16", "--fix", "dp=2,mbs=4"], "12"),
    "sequence beyond the positions": (nothing, ["plan", "config.json", "local", "--batch", "4", "--seq", "65"], "65.*64|64.*65"),
    "more ranks than devices": (change("plan.json", "stages", 0, "ranks", list(range(16))), ["check", "plan.json"], "needs 1[67] devices.*has 2"),
    "plan on too small a cluster": (nothing, ["check", "plan.json", "--cluster", "1x1xH100-SXM"], r"needs 2 devices.*has 1"),
    "plan of another model": (change("plan.json", "model", "fingerprint", "0" * 16), ["run", "plan.json"], "another model"),
    "simulate the plan of another model": (nothing, ["simulate", "gpt2", "local", "--plan", "plan.json"], "another model"),
    "plan of another cluster": (change("plan.json", "cluster", "fingerprint", "0" * 16), ["check", "plan.json"], "fingerprint"),
    "plan of another version": (change("plan.json", "schema_version", 99), ["run", "plan.json"], "version 99.*version 1"),
    "program of another version": (change("program.json", "schema_version", 0), ["run", "program.json"], "version 0"),
    "device without rates": (change("local.json>c.json", "devices", 0, "flops_per_s", {}), ["plan", "config.json", "c.json"], "device 0: flops_per_s is empty"),
    "device without profile": (change("local.json>c.json", "devices", 0, "profile", None), ["plan", "config.json", "c.json"], "profile is None; give"),
    "cluster without profile": (change("local.json>c.json", "profile", 0), ["plan", "config.json", "c.json"], "profile is 0; give an object"),
    "cluster of another version": (change("local.json>c.json", "schema_version", 7), ["plan", "config.json", "c.json"], "version 7"),
    "model has moved": (change("plan.json", "model", "name", "/nowhere/config.json"), ["run", "plan.json"], "/nowhere/config.json"),
    # experts, what is trained, and how it is updated
    "ep without experts": (nothing, [*PLAN, "--fix", "ep=2"], "has no experts to split; leave ep out"),
    "ep against experts": (nothing, ["plan", "mixtral-tiny", *H100, "--fix", "ep=3"], "3 does not divide the 8 experts of a layer; legal are 1, 2, 4, 8"),
    "ep against the ranks": (nothing, ["plan", "mixtral-tiny", *H100, "--fix", "ep=4,dp=1,tp=2"], "with dp=1, tp=2 ep can be 1, 2"),
    "imbalance without experts": (nothing, [*PLAN, "--moe-imbalance", "2"], "has no experts; leave it out"),
    **{f"imbalance {x}": (nothing, [*PLAN, "--moe-imbalance", x], f"`{x}`") for x in ("0", "nan", "much")},
    "unknown setting": (nothing, [*PLAN, "--optimizer", "muon:beta9=1"], "muon has no setting `beta9`; did you mean beta"),
    "setting no number": (nothing, [*PLAN, "--optimizer", "muon:lr=fast"], "lr is 'fast'"),
    "setting no pair": (nothing, [*PLAN, "--optimizer", "lamb:lr"], "`lr` is no setting"),
    "lora rank": (nothing, [*PLAN, "--lora", "rank=0"], "rank is 0"),
    "lora key": (nothing, [*PLAN, "--lora", "r=8,foo=1"], "`foo` is no key; keys are r, rank"),
    "lora target": (nothing, [*PLAN, "--lora", "rank=8,targets=xyz"], "no product called xyz; it has down, k, out, q"),
    "lora twice": (nothing, ["plan", "gpt2-tiny+lora(rank=8)", *H100, "--lora", "rank=4"], "says already what is trained"),
    "freeze nothing": (nothing, [*PLAN, "--freeze", ""], "--freeze names nothing"),
    "freeze no name": (nothing, [*PLAN, "--freeze", "nothing*"], "no parameter of .* is called like that"),
    "freeze everything": (nothing, [*PLAN, "--freeze", "*"], "nothing of .* is left to train"),
    "encoder too long": (nothing, ["plan", "bert-large", *H100[:1], "--batch", "16", "--seq", "1024"], "512 learned positions"),
    "image of another size": (nothing, ["plan", "vit-l-16", *H100[:1], "--batch", "16", "--seq", "64"], "its seq is 197"),
    "pieces of an encoder": (nothing, ["plan", "t5-small", *H100[:1], "--batch", "16", "--fix", "schedule=seq1f1b,pp=2"], "t5-small` cannot be cut"),
    "pieces of another schedule": (nothing, ["plan", "config.json", *H100, "--fix", "schedule=1f1b,seq_chunks=4"], "runs whole sequences.*choose seq1f1b"),
    "pieces beyond the tokens": (nothing, ["plan", "config.json", *H100, "--fix", "seq_chunks=32"], "no more pieces than tokens"),
    "two copies of too few": (nothing, ["plan", "gpt2", "1x8xH100-SXM", "--batch", "8", "--seq", "16", "--fix", "schedule=dualpipe,pp=8"],
                              "dualpipe cannot run 8 microbatches on pp = 8 ranks: m must be even.*legal near it are 16, 18, 20, 22 microbatches"),
    "layout of no axis": (nothing, [*PLAN, "--fix", "layout=batch:xx"], "has no axis `xx`; its axes are dp, tp"),
    "plan of modules missing": (nothing, [*PLAN, "--fix", "tp_plan=nowhere.json"], "`nowhere.json` cannot be read"),
    "placement of no dim": (nothing, [*PLAN, "--fix", "h.*.mlp.up.weight=[tp:S(7)],tp=2"], "cannot be S.7. on axis tp = 2: it has 2 dims"),
    # plans that are compared, and words too many
    "against nothing": (nothing, ["explain", "plan.json", "--against", "nowhere.json"], "nowhere.json` is not there"),
    "about nothing": (nothing, ["explain", "plan.json", "--about", "h.*.mlp.upp"], "no operator or parameter .*upp`; write a name or a pattern"),
    "run a model": (nothing, ["run", "gpt2"], "`gpt2` is no file.*headrace plan MODEL CLUSTER -o plan.json"),
    "run with a cluster": (nothing, ["run", "plan.json", "local"], "`local` is a word too many for `headrace run`"),
    # measured runs
    "runs missing": (nothing, ["validate", "nowhere.csv"], "`nowhere.csv` cannot be read as a table of runs"),
    "runs no table": (nothing, ["validate", "plan.json"], "is no table of runs that is known"),
    "calibrate by nothing": (nothing, ["calibrate", "local", "--plan", "plan.json", "-o", "out.json"], "either --step-s.* or --measured"),
    "calibrate on too few": (nothing, ["calibrate", "1x1xH100-SXM", "--plan", "plan.json", "--step-s", "1", "-o", "out.json"], "needs 2 devices.*has 1"),
    "calibrate by a prediction": (nothing, ["calibrate", "local", "--plan", "plan.json", "--measured", "timeline.json", "-o", "o.json"], "predicted timeline"),
    # sizes and bandwidths
    **{f"batch {n}": (nothing, ["plan", "config.json", "local", "--batch", n], f"`{n}` is no count") for n in ("0", "-4", "nan", "2.5", "inf", "")},
    **{f"seq {n}": (nothing, ["plan", "config.json", "local", "--seq", n], f"`{n}` is no count") for n in ("0", "-1", "nan")},
    **{f"steps {n}": (nothing, ["run", "plan.json", "--steps", n], f"`{n}` is no count") for n in ("0", "-1", "nan")},
    **{f"lr {n}": (nothing, ["run", "plan.json", "--lr", n], f"`{n}`") for n in ("0", "-1", "nan", "inf", "fast")},
    **{f"memory fraction {n}": (nothing, [*PLAN, "--memory-fraction", n], f"`{n}`") for n in ("0", "-1", "nan", "1.5")},
    **{f"budget {n}": (nothing, [*PLAN, f"--budget={n}"], f"`{n}") for n in ("0s", "-1m", "nan", "soon")},
    **{f"port {n}": (nothing, ["ui", "--port", n], f"`{n}` is no port") for n in ("0", "65536", "nan")},
    **{f"cluster {c}": (nothing, ["plan", "config.json", c], "finite|whole|1 or more|above 0|understood") for c in
       ("0x8xH100-SXM", "4x-8xH100-SXM", "4x8xH100-SXM@ib0", "4x8xH100-SXM@ibnan", "4x8xH100-SXM@ib-400", "nanx8xH100-SXM")},
    **{f"config n_layer {v}": (change("config.json", "n_layer", v), PLAN, "n_layer") for v in (0, -2, 2.5, "two")},
    "config NaN": (write("config.json", json.dumps(GPT2).replace("48", "NaN")), PLAN, "n_embd|NaN"),
    **{f"device {key} {v}": (change("local.json>c.json", "devices", 0, key, v), ["plan", "config.json", "c.json"], key) for key in
       ("memory_bytes", "usable_bytes", "bytes_per_s") for v in (0, -1.0, float("nan"), "much", None)},
    **{f"link bandwidth {v}": (change("local.json>c.json", "links", 0, "bytes_per_s", v), ["plan", "config.json", "c.json"], "bytes_per_s") for v in
       (0, -1.0, float("nan"), "fast")},
    "link latency": (change("local.json>c.json", "links", 0, "latency_s", -1.0), ["plan", "config.json", "c.json"], "latency_s"),
    "disconnected": (drop_links, PLAN, "not connected"),
    # places and texts
    **{f"{argv[0]} -o nowhere/out.json": (nothing, [*argv, "-o", "nowhere/out.json"], "nowhere` does not exist") for argv in
       (["plan", "config.json", "local"], ["lower", "plan.json"], ["measure"])},
    "-o a folder": (lambda folder: (folder / "out").mkdir(), [*PLAN[:-1], "out"], "is a folder"),
    "trace nowhere": (nothing, ["simulate", "config.json", "local", "--plan", "plan.json", "--trace", "nowhere/t.json"], "nowhere` does not exist"),
    "timeline nowhere": (nothing, ["run", "plan.json", "--timeline", "nowhere/t.json"], "nowhere` does not exist"),
    "text missing": (nothing, ["run", "plan.json", "--data", "nowhere.txt"], "nowhere.txt"),
    "text empty": (write("empty.txt", ""), ["run", "plan.json", "--data", "empty.txt"], "empty"),
    "text binary": (write("binary.txt", bytes(range(256)) * 20), ["run", "plan.json", "--data", "binary.txt"], "binary"),
    "text too short": (write("short.txt", "abc"), ["run", "plan.json", "--data", "short.txt"], "3 bytes"),
}  # fmt: skip


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, argv, says = CASES[name]
    spoil(folder)
    before = listing(folder)
    exit_code = main([*argv, "--json"])
    out, err = capsys.readouterr()
    complaint = err.strip().splitlines()[-1]
    assert exit_code == 2, err
    assert complaint.startswith("headrace: ")
    assert re.search(says, complaint), complaint
    assert "Traceback" not in err
    assert out == ""
    assert listing(folder) == before


@pytest.mark.parametrize(
    "key", ["model", "cluster", "batch", "seq", "dtype", "optimizer", "mesh", "stages", "schedule", "num_microbatches", "params", "rules", "hubs"]
)
@pytest.mark.parametrize("value", [None, "x", -1, [], {}], ids=repr)
def test_a_damaged_plan_is_refused(key: str, value: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change("plan.json", key, value)(folder)
    assert main(["lower", "plan.json", "-o", "out.json"]) == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint.startswith("headrace: ")
    assert not (folder / "out.json").exists()


@pytest.mark.parametrize("part", range(1, 10))
def test_a_plan_cut_anywhere_is_refused(part: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text[: len(text) * part // 10])
    assert main(["run", "plan.json"]) == 2
    assert "no JSON document" in capsys.readouterr().err
