"""The page: choose a model and a cluster, plan, look at what was found. Run by Streamlit (`headrace ui`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from headrace.layouts import FITS, describe, percent
from headrace.prediction import Prediction
from ir.errors import HeadraceError
from ir.units import count, seconds
from planner.frontends import zoo_names
from simulator.profile import gpu_names, machine_names
from ui import charts
from ui.question import Answer, Question, Upload, answer

DTYPES = {"": "auto", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MANY_RANKS = 8
NO_BREAK = "\N{NO-BREAK SPACE}"


def main() -> None:
    st.set_page_config("headrace", layout="wide")
    st.title("headrace")
    st.caption("How to train a model on a cluster: planned, and foretold, before anything runs.")
    asked = ask()
    if asked is not None:
        plan(asked)
    complaint, found = st.session_state.get("complaint"), st.session_state.get("answer")
    if complaint:
        st.error(complaint)
    elif found is None:
        st.info("Choose a model and a cluster on the left, then press **Plan**.")
    else:
        show(found)


def ask() -> Question | None:
    """The form on the left; a question once the button is pressed, None before and when something is missing (which it says)."""
    with st.sidebar:
        model = ask_model()
        cluster = ask_cluster()
        left, right = st.columns(2)
        batch = left.number_input("Batch", min_value=1, value=64, step=1, key="batch", help="global batch, in sequences")
        seq = right.number_input("Sequence", min_value=1, value=1024, step=1, key="seq", help="tokens of a sequence")
        dtype = left.selectbox("Dtype", list(DTYPES), format_func=DTYPES.__getitem__, key="dtype", help="auto: bf16, or fp32 where there is no bf16")
        top = right.number_input("Plans", min_value=1, max_value=20, value=5, step=1, key="top", help="how many of the best to show")
        fix = st.text_input("Fixed axes", placeholder="tp=2, pp=4", key="fix", help="what every plan must keep: dp, tp, pp, mbs, zero, ... as `--fix` takes it")
        pressed = st.button("Plan", type="primary", key="go", width="stretch")
    if not pressed:
        return None
    if model is None or cluster is None:
        what = "the model's config.json" if model is None else "a cluster JSON"
        st.session_state.update(answer=None, complaint=f"Hand in {what} first, or choose by name.")
        return None
    return Question(model, cluster, int(batch), int(seq), dtype or None, fix, int(top))


def ask_model() -> str | Upload | None:
    source = st.radio("Model", ("by name", "config.json"), horizontal=True, key="model_source")
    if source == "by name":
        names = zoo_names()
        return st.selectbox("Name", names, index=names.index("gpt2"), key="model_name", label_visibility="collapsed")
    return _upload("A Hugging Face config.json", "model_file")


def ask_cluster() -> str | Upload | None:
    source = st.radio("Cluster", ("by name", "cluster.json"), horizontal=True, key="cluster_source")
    if source == "cluster.json":
        return _upload("As `headrace measure -o cluster.json` writes it", "cluster_file")
    name = st.text_input(
        "Name", "1x8xH100-SXM", key="cluster_name", label_visibility="collapsed",
        help="`local` (this machine, measured), NODESxGPUSxNAME such as 4x8xH100-SXM@ib400, or a machine such as 4xdgx-a100",
    )  # fmt: skip
    with st.popover("Known names", width="stretch"):
        st.markdown(_names("GPUs", gpu_names()) + _names("Machines", machine_names()) + "`local` is this machine, measured when it is first used.")
    return name


def _names(title: str, names: Sequence[str]) -> str:
    return f"**{title}**: {', '.join(f'`{name}`' for name in names)}\n\n"


def _upload(label: str, key: str) -> Upload | None:
    given = st.file_uploader(label, type="json", key=key)
    return Upload(given.name, given.getvalue()) if given is not None else None


def plan(asked: Question) -> None:
    """Answers into the session, or says why not; what was found before is forgotten."""
    st.session_state.update(answer=None, complaint=None, foretold={}, round=st.session_state.get("round", 0) + 1)
    bar = st.progress(0.0, "Planning ...")

    def progress(what: str, done: int = 0, of: int = 0) -> None:
        bar.progress(done / of if of else 0.0, _plain(what))

    try:
        st.session_state["answer"] = answer(asked, progress)
    except HeadraceError as error:
        st.session_state["complaint"] = _plain(str(error))
    bar.empty()


def show(found: Answer) -> None:
    entries, result, best = found.entries(), found.result, found.result.plans[0]
    st.subheader(f"{found.model.name} on {found.cluster.name}")
    parameters, devices = count(found.model.num_params), found.cluster.num_devices
    st.markdown(_plain(f"{parameters} parameters · {devices} devices · batch of {best.batch} sequences of {best.seq} tokens · {best.dtype}"))
    for sentence in found.cluster.assumed:
        st.caption(_plain(f"Assumed: {sentence}"))
    st.table([_row(e) for e in entries], border="horizontal", hide_index=True)
    proof = "the best of the searched space" if result.optimal else f"not proved to be the best: gap at most {percent(result.gap)}"
    st.caption(f"{result.searched:,} candidates, {result.evaluated:,} evaluated, {result.pruned:,} pruned in {seconds(result.seconds)}; {proof}.")
    _figure(charts.ranked_plans(entries), "ranked")
    names = [f"{e['rank']}. {describe(e['layout'])}" for e in entries]
    show_plan(found, st.selectbox("Look at plan", range(len(names)), format_func=names.__getitem__, key=_key("chosen")))


def show_plan(found: Answer, index: int) -> None:
    chosen = found.result.plans[index]
    for column, (name, value) in zip(st.columns(6), _facts(chosen.predicted).items(), strict=True):
        column.metric(name, value)
    st.markdown(_plain(chosen.predicted["why"]))
    try:
        foretold = _foretold(found, index)
    except HeadraceError as error:
        st.error(_plain(str(error)))
        return
    times, memory, step = st.tabs(["Timeline", "Memory", "Step"])
    with times:
        show_timeline(foretold, index)
    with memory:
        _figure(charts.memory(foretold.ledger.ranks, foretold.ledger.usable), "memory")
    with step:
        _figure(charts.breakdown({describe(chosen.layout): chosen.predicted["breakdown"]}), "breakdown")
    left, right, _ = st.columns([1, 1, 3])
    document = json.dumps(chosen.to_json(), indent=1)
    left.download_button("plan.json", document, "plan.json", "application/json", key="get_plan", width="stretch")
    right.download_button(
        "trace.json", lambda: trace_of(foretold), "trace.json", "application/json", key="get_trace", width="stretch", help="the timeline for ui.perfetto.dev"
    )


def show_timeline(foretold: Prediction, index: int) -> None:
    left, right = st.columns(2)
    shown = left.multiselect("Ranks", foretold.program.ranks, default=_representatives(foretold), key=_key("ranks", index))
    begin, end = right.slider("Part of the step [%]", 0, 100, (0, 100), key=_key("window", index))
    if not shown or begin == end:
        st.info("Choose at least one rank and a part of the step.")
        return
    if len(foretold.program.ranks) < foretold.plan.num_ranks:
        st.caption("The ranks of a stage do the same; the first of each stage stands for all of them.")
    spans, last = foretold.timeline.spans, max(s.step for s in foretold.timeline.spans)
    lanes, kinds = {"predicted": spans}, charts.kinds(foretold.program)
    _figure(charts.timeline(lanes, kinds, title="One step, predicted", step=last, ranks=shown, window=(begin / 100, end / 100)), "timeline")
    st.caption("A number on a bar is its microbatch. Bars too narrow to be seen are merged: the height of a colour is then its share of the time.")


def _representatives(foretold: Prediction) -> Sequence[int]:
    """The first rank of every stage; where there is one stage, the first two ranks."""
    stages = foretold.plan.stages
    return [s.ranks[0] for s in stages][:MANY_RANKS] if len(stages) > 1 else foretold.program.ranks[:2]


def _foretold(found: Answer, index: int) -> Prediction:
    kept: dict[int, Prediction] = st.session_state.setdefault("foretold", {})
    if index not in kept:
        with st.spinner("Simulating ..."):
            kept[index] = found.foretell(index)
    return kept[index]


def trace_of(foretold: Prediction) -> str:
    """The predicted timeline as Perfetto reads it."""
    return json.dumps(foretold.timeline.to_perfetto(foretold.program))


def _facts(told: Mapping[str, Any]) -> Mapping[str, str]:
    return {
        "Step": seconds(told["step_s"]), "Tokens/s per device": f"{told['tokens_per_s_per_gpu']:,.0f}", "MFU": percent(told["mfu"]),
        "Bubble": percent(told["bubble"]), "Peak memory": f"{told['peak_gib']:.3g} GiB", "Memory": FITS[told["fits"]],
    }  # fmt: skip


def _row(entry: Mapping[str, Any]) -> Mapping[str, object]:
    cells = {
        "step": seconds(entry["step_s"]), "MFU": percent(entry["mfu"]), "tokens/s/device": f"{entry['tokens_per_s_per_gpu']:,.0f}",
        "bubble": percent(entry["bubble"]), "peak": f"{entry['peak_gib']:.3g} GiB", "memory": FITS[entry["fits"]],
    }  # fmt: skip
    figures = {name: text.replace(" ", NO_BREAK) for name, text in cells.items()}
    return {"": entry["rank"], "layout": describe(entry["layout"]), **figures, "why": entry["why"]}


def _figure(figure: go.Figure, key: str) -> None:
    st.plotly_chart(figure, theme=None, key=f"figure_{key}", config={"displaylogo": False})


def _key(name: str, index: int = 0) -> str:
    """The name of a widget that starts anew with every answer and plan."""
    return f"{name}_{st.session_state['round']}_{index}"


def _plain(text: str) -> str:
    """Text in which Markdown finds no signs of its own but code.

    >>> _plain("`dp` is [dp: S(0)], 2 ~ 3 $")
    '`dp` is \\\\[dp\\\\: S(0)\\\\], 2 \\\\~ 3 \\\\$'
    """
    code = False
    out = []
    for c in text:
        code ^= c == "`"
        out.append(f"\\{c}" if c in "*_[]~$:#<>" and not code else c)
    return "".join(out)


if __name__ == "__main__":
    main()
