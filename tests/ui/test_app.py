"""The page walked as a user would: by name and with files handed in, right and wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import headrace as hr
from ir.plan import Plan
from ui import app

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
PATIENCE_S = 120


@pytest.fixture
def page(local: Path) -> AppTest:
    return AppTest.from_file(str(Path(app.__file__)), default_timeout=PATIENCE_S).run()


def fill(page: AppTest, **values: Any) -> AppTest:
    for key, value in values.items():
        widgets = [w for kind in ("selectbox", "number_input", "text_input", "radio", "slider", "multiselect") for w in page.get(kind) if w.key == key]
        widgets[0].set_value(value)
    return page.run()


def press_plan(page: AppTest) -> AppTest:
    page.button(key="go").click()
    return page.run()


def hand_in(page: AppTest, what: str, name: str, content: bytes) -> AppTest:
    """Chooses to hand in a file instead of naming the model or cluster, and does."""
    fill(page, **{f"{what}_source": {"model": "config.json", "cluster": "cluster.json"}[what]})
    page.get("file_uploader")[0].upload(name, content, "application/json")
    return page.run()


def figures(page: AppTest) -> dict[str, dict]:
    """The figures by their title."""
    found = [json.loads(chart.proto.spec or chart.proto.figure.spec) for chart in page.get("plotly_chart")]
    return {figure["layout"]["title"]["text"]: figure for figure in found}


def complaint(page: AppTest) -> str:
    assert not page.exception, page.exception
    assert len(page.error) == 1
    return page.error[0].value


def test_the_empty_page_says_what_to_do(page):
    assert not page.exception
    assert not page.error
    assert "press **Plan**" in page.info[0].value
    assert "gpt2" in page.selectbox(key="model_name").options


@pytest.fixture
def planned(page: AppTest) -> AppTest:
    hand_in(page, "model", "tiny.json", json.dumps(CONFIG).encode())
    return press_plan(fill(page, cluster_name="1x4xH100-SXM", batch=8, seq=64, top=3))


def test_a_model_of_the_zoo_is_planned_and_looked_at(page):
    press_plan(fill(page, cluster_name="1x2xH100-SXM", batch=4, seq=128, top=2, fix="pp=1, mbs=1"))
    assert not page.exception, page.exception
    assert not page.error
    assert page.subheader[0].value == "gpt2 on 1x2xH100-SXM"
    table = page.table[0].value
    assert list(table[""]) == [1, 2]
    assert table["why"].str.len().min() > 10
    drawn = figures(page)
    assert set(drawn) == {"Plans, fastest first", "One step, predicted", "Memory by rank", "Where the step goes"}
    assert {"forward", "input gradient", "weight gradient", "update"} <= {trace["name"] for trace in drawn["One step, predicted"]["data"]}
    assert {"parameter", "optimizer"} <= {trace.get("name") for trace in drawn["Memory by rank"]["data"]}
    assert [metric.label for metric in page.metric] == ["Step", "Tokens/s per device", "MFU", "Bubble", "Peak memory", "Memory"]


def test_the_plans_are_those_of_the_verb(planned, tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    result = hr.plan(str(tmp_path / "tiny.json"), "1x4xH100-SXM", batch=8, seq=64, top=3)
    assert planned.session_state["answer"].result.plans == tuple(replace(p, model="tiny.json") for p in result.plans)


def test_another_plan_can_be_looked_at(planned):
    before = planned.metric[0].value
    step = figures(planned)["Where the step goes"]
    fill(planned, chosen_1_0=1)
    assert not planned.exception
    assert planned.metric[0].value != before or figures(planned)["Where the step goes"] != step
    assert figures(planned)["Where the step goes"]["data"][0]["y"] != step["data"][0]["y"]


def test_the_timeline_shows_the_ranks_and_the_part_that_are_chosen(planned):
    rows = {y for trace in figures(planned)["One step, predicted"]["data"] for y in trace["y"]}
    assert any(row.startswith("rank 0") for row in rows)
    fill(planned, ranks_1_0=[3])
    fill(planned, window_1_0=(90, 100))
    figure = figures(planned)["One step, predicted"]
    assert {y.split(" ·")[0] for trace in figure["data"] for y in trace["y"]} == {"rank 3"}
    assert "forward" not in {trace["name"] for trace in figure["data"]}
    assert figure["layout"]["xaxis"]["range"][0] > 0
    fill(planned, ranks_1_0=[])
    assert not planned.exception
    assert "at least one rank" in planned.info[0].value


def test_the_downloads_are_a_plan_and_a_trace(planned):
    names = [button.label for button in planned.get("download_button")]
    assert names == ["plan.json", "trace.json"]
    made = planned.session_state["answer"].result.plans[0]
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert json.loads(app.trace_of(planned.session_state["foretold"][0]))["traceEvents"]


def test_a_config_and_a_cluster_that_are_handed_in(page, local_document):
    hand_in(page, "model", "tiny.json", json.dumps(CONFIG).encode())
    fill(page, cluster_name="local", batch=4, seq=32)
    press_plan(page)
    assert not page.exception, page.exception
    assert not page.error
    by_name = page.session_state["answer"].result.plans[0]
    assert by_name.model == "tiny.json"
    assert "tiny" in page.subheader[0].value
    hand_in(page, "model", "tiny.json", json.dumps(CONFIG).encode())
    fill(page, cluster_source="cluster.json")
    page.get("file_uploader")[1].upload("mine.json", json.dumps(local_document).encode(), "application/json")
    press_plan(page.run())
    assert not page.error, complaint(page)
    assert page.session_state["answer"].result.plans[0].cluster == "mine.json"
    assert page.session_state["answer"].result.plans[0].cluster_fingerprint == by_name.cluster_fingerprint


def test_of_many_ranks_the_first_of_each_stage_stands_for_all(page):
    hand_in(page, "model", "tiny.json", json.dumps(CONFIG).encode())
    press_plan(fill(page, cluster_name="2x8xH100-SXM", batch=16, seq=32, top=1, fix="dp=8, pp=2, mbs=1"))
    assert not page.error, complaint(page)
    foretold = page.session_state["foretold"][0]
    assert foretold.program.ranks == (0, 8)
    assert foretold.step_s == pytest.approx(page.session_state["answer"].result.plans[0].predicted["step_s"], rel=0.02)
    assert any("stands for all" in caption.value for caption in page.caption)
    assert page.multiselect[0].value == [0, 8]


def test_fixed_axes_are_kept(page):
    hand_in(page, "model", "tiny.json", json.dumps(CONFIG).encode())
    press_plan(fill(page, cluster_name="1x4xH100-SXM", batch=8, seq=64, top=2, fix="tp=2, pp=1"))
    assert not page.error, complaint(page)
    assert {(p.layout["tp"], p.layout["pp"]) for p in page.session_state["answer"].result.plans} == {(2, 1)}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fix": "tp"}, "is no key=value"),
        ({"fix": "tq=2"}, "did you mean tp"),
        ({"fix": "tp=3"}, "3"),
        ({"cluster_name": "4x8xH1000"}, "H1000"),
        ({"cluster_name": "/nowhere/cluster.json"}, "nowhere"),
        ({"cluster_name": "local", "dtype": "bfloat16"}, "bfloat16"),
        ({"seq": 4096}, "1024"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(page, values, said):
    message = complaint(press_plan(fill(page, cluster_name=values.pop("cluster_name", "1x4xH100-SXM"), **values)))
    assert said in message
    assert "Traceback" not in message
    assert not page.subheader


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"{", "JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"{}", "model"),
        (json.dumps({**CONFIG, "auto_map": {"AutoModel": "x.Y"}}).encode(), "auto\\_map"),
    ],
    ids=["empty", "cut off", "binary", "no model", "code"],
)
def test_a_wrong_config_is_said_without_the_servers_paths(page, content, said):
    message = complaint(press_plan(hand_in(page, "model", "mine.json", content)))
    assert said.replace("\\", "") in message.replace("\\", "")
    assert "mine.json" in message
    assert "/tmp" not in message


def test_a_missing_file_is_asked_for(page):
    fill(page, model_source="config.json")
    assert "config.json" in complaint(press_plan(page))
    fill(page, model_source="by name", cluster_source="cluster.json")
    assert "cluster JSON" in complaint(press_plan(page))


def test_a_complaint_goes_away_with_the_next_plan(page):
    hand_in(page, "model", "tiny.json", json.dumps(CONFIG).encode())
    complaint(press_plan(fill(page, cluster_name="1x2xH100-SXM", batch=2, seq=64, top=1, fix="nonsense")))
    press_plan(fill(page, fix="dp=2"))
    assert not page.error
    assert page.subheader[0].value == "tiny on 1x2xH100-SXM"
