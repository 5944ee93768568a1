"""Models by name and by config: counts, shapes, the graph's words, and what is refused."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ir.errors import GraphError, InputError
from ir.graph import Graph
from planner.frontends import load, zoo_names
from planner.frontends.transformer import params, salt

GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 101, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip

# Elements of the published models, tied tables once; test_torch_parity.py counts the same in the modules of `transformers`
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "mistral-7b": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "qwen2-0.5b": 494_032_768, "qwen2-1.5b": 1_543_714_304, "qwen2-7b": 7_615_616_512, "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "gpt-neox-20b": 20_554_567_680, "pythia-1.4b": 1_414_647_808, "falcon-7b": 6_921_720_704, "falcon-40b": 41_303_293_952,
    "phi-1.5": 1_418_270_720, "phi-2": 2_779_683_840, "phi-3-mini": 3_821_079_552, "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320, "gemma-3-1b": 999_885_952, "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224, "deepseek-v2": 235_741_434_880, "deepseek-v3[extra_predictions=0]": 671_026_419_200, "bert-base": 109_514_298,
    "bert-large": 335_174_458, "vit-b-16": 86_567_656, "vit-l-16": 304_326_632, "vit-h-14": 632_045_800, "t5-small": 60_506_624, "t5-base": 222_903_552,
    "t5-large": 737_668_096, "t5-3b": 2_851_598_336, "t5-11b": 11_307_321_344,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A config.json with some keys changed; a value of `...` takes the key out."""
    merged = {k: v for k, v in {**config, **changes}.items() if v is not ...}
    path = folder / "config.json"
    path.write_text(json.dumps(merged))
    return path


# ---- the zoo -----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_zoo_counts_are_the_published_ones(name: str) -> None:
    assert load(name).num_params == PUBLISHED[name]


@pytest.mark.parametrize(("name", "billions"), [("gpt3-175b", 174.6), ("gpt-1t", 1008.0), ("gpt3-13b", 12.85), ("gpt3-6.7b", 6.65)])
def test_gpt_sizes_are_the_papers(name: str, billions: float) -> None:
    assert load(name).num_params / 1e9 == pytest.approx(billions, rel=2e-3)


def test_megatron_formula_gives_the_count_of_gpt_1t() -> None:
    # Narayanan et al. 2021, equation (2)
    c = load("gpt-1t").config
    formula = 12 * c.num_layers * c.hidden**2 * (1 + 13 / (12 * c.hidden) + (c.vocab + c.max_positions) / (12 * c.num_layers * c.hidden))
    assert load("gpt-1t").num_params == pytest.approx(formula, rel=1e-7)


@pytest.mark.parametrize("name", zoo_names())
def test_every_zoo_model_builds_and_says_where_it_comes_from(name: str) -> None:
    model = load(name, num_layers=2)
    graph = model.graph(batch=2, seq=model.max_seq if model.config.image else 8, dtype="bf16")
    assert graph.num_params == model.num_params
    assert graph.num_layers == model.num_layers + 2
    assert graph.outputs == ("loss",)
    assert graph.tensors["loss"].shape == ()
    assert model.source
    assert Graph.parse(str(graph)) == graph


def test_a_model_read_again_by_its_reference_is_the_same(tmp_path: Path) -> None:
    for model in (load("gpt2"), load("llama-3-8b", num_layers=3), load(write(tmp_path, LLAMA)), load(write(tmp_path, LLAMA), num_layers=1)):
        assert load(model.reference) == model


def test_the_summary_has_the_facts() -> None:
    facts = load("llama-3-8b").summary
    assert {k: facts[k] for k in ("num_params", "layers", "heads", "kv_heads", "vocab")} == {
        "num_params": 8_030_261_248, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 128_256,
    }  # fmt: skip
    assert "huggingface.co" in facts["source"]
    json.dumps(facts)


# ---- the graph ---------------------------------------------------------------------------------------------------------------------------------------


def shape(graph: Graph, tensor: str) -> tuple[int, ...]:
    return graph.tensors[tensor].shape


def test_gpt2_graph() -> None:
    graph = load("gpt2").graph(batch=3, seq=16, dtype="fp32")
    assert [str(graph.tensors[t].dtype) for t in ("ids", "labels", "wte.weight", "loss")] == ["int64", "int64", "float32", "float32"]
    assert shape(graph, "h.11.attn.q.weight") == (768, 768)
    assert shape(graph, "h.0.mlp.up.weight") == (768, 3072)
    assert shape(graph, "lm_head") == (3, 16, 50257)
    assert graph.node["lm_head"].inputs == ("ln_f", "wte.weight")
    assert graph.node["h.0.mlp.act"].attrs == {"approximate": "tanh"}
    assert graph.node["loss"].attrs == {"factor": 1 / 48}
    attend = graph.node["h.4.attn.attend"].attrs
    assert attend == {"r": 1, "d": 64, "causal": True, "scale": 0.125, "p": 0.1, "salt": salt("h.4.attn.attend")}
    assert graph.tensors["h.0.mlp.down.weight"].init == {"init": "normal", "std": pytest.approx(0.02 / math.sqrt(24))}
    assert graph.tensors["h.0.mlp.up.weight"].init == {"init": "normal", "std": 0.02}
    assert graph.tensors["h.3.ln_2.weight"].init == {"init": "ones"}
    assert graph.tensors["h.3.ln_2.bias"].init == {"init": "zeros"}


def test_layers_are_embedding_blocks_head() -> None:
    graph = load("gpt2-tiny").graph(batch=1, seq=4, dtype="fp32")
    layer = {n.name: n.layer for n in graph.nodes}
    assert [layer[n] for n in ("wte", "embed.drop", "h.0.ln_1", "h.3.mlp.residual", "ln_f", "lm_head", "loss")] == [0, 0, 1, 4, 5, 5, 5]
    assert sorted(set(layer.values())) == list(range(6))
    # a pipeline cut between two layers is crossed by the residual only
    for cut in range(1, 5):
        crossing = {t for n in graph.nodes if n.layer >= cut for t in n.inputs if (p := graph.producer(t)) and p.layer < cut}
        assert len(crossing) == 1


def test_salts_differ_and_stay() -> None:
    graph = load("gpt2").graph(batch=1, seq=4, dtype="fp32")
    salts = [n.attrs["salt"] for n in graph.nodes if "salt" in n.attrs]
    assert len(salts) == 1 + 3 * 12
    assert len(set(salts)) == len(salts)
    assert salt("embed.drop") == 240048014  # a checkpointed run replays the same masks in the next release


def test_llama_graph_has_grouped_queries_rope_and_own_head() -> None:
    graph = load("llama-3-8b", num_layers=1).graph(batch=1, seq=8, dtype="bf16")
    assert shape(graph, "h.0.attn.k.weight") == (4096, 1024)
    assert graph.node["h.0.attn.attend"].attrs == {"r": 4, "d": 128, "causal": True, "scale": 128**-0.5}
    assert graph.node["h.0.attn.k.rope"].attrs == {"d": 128, "theta": 500_000.0}
    assert graph.node["lm_head"].inputs[1] == "lm_head.weight"
    assert graph.node["h.0.mlp.act"].op == "swiglu"
    assert not [n for n in graph.nodes if n.op in ("dropout", "bias")]


def test_head_dim_is_the_configs_own() -> None:
    graph = load("qwen3-0.6b", num_layers=1).graph(batch=1, seq=8, dtype="bf16")
    assert shape(graph, "h.0.attn.q.weight") == (1024, 2048)
    assert shape(graph, "h.0.attn.out.weight") == (2048, 1024)
    assert shape(graph, "h.0.attn.q.norm.weight") == (128,)
    assert graph.node["h.0.attn.q.rope"].inputs == ("h.0.attn.q.norm",)
    assert graph.node["lm_head"].inputs[1] == "wte.weight"


def test_qwen2_has_biases_on_q_k_v_only() -> None:
    names = {p for p in params(load("qwen2-7b", num_layers=1).config) if p.endswith(".bias")}
    assert names == {"h.0.attn.q.bias", "h.0.attn.k.bias", "h.0.attn.v.bias"}


def test_rope_scaling() -> None:
    rope = load("llama-3.2-1b", num_layers=1).graph(1, 8, "bf16").node["h.0.attn.q.rope"].attrs
    assert rope == {"d": 64, "theta": 500_000.0, "factor": 32.0, "low": 1.0, "high": 4.0, "original": 8192}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_theta": 5e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e4, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_rope_parameters_in_every_spelling(tmp_path: Path, spelling: dict[str, Any]) -> None:
    graph = load(write(tmp_path, LLAMA, **spelling)).graph(1, 8, "fp32")
    assert graph.node["h.0.attn.q.rope"].attrs == {"d": 6, "theta": 5e4, "factor": 4.0}


def test_theta_can_be_overridden_in_both_spellings(tmp_path: Path) -> None:
    assert load("llama-3-8b", theta=1e4).config.attention.rope.theta == 1e4  # type: ignore[union-attr]
    path = write(tmp_path, LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    assert load(path, theta=1e4).config.attention.rope.theta == 1e4  # type: ignore[union-attr]


def test_forward_flops_are_two_for_each_weight_and_token() -> None:
    model = load("llama-3-8b", num_layers=2)
    batch, seq = 2, 64
    graph = model.graph(batch, seq, "bf16")
    flops = sum(graph.op(n).flops_of(graph.sizes(n), n.attrs) for n in graph.nodes if n.op in ("linear", "linear_t"))
    weights = model.num_params - sum(p.num_elements for name, p in params(model.config).items() if name == "wte.weight" or "ln_" in name)
    assert flops == 2 * weights * batch * seq


def test_flops_follow_head_dim_and_not_the_hidden_size() -> None:
    # B075: Qwen3's heads are wider than hidden / heads
    model = load("qwen3-0.6b", num_layers=1)
    graph = model.graph(1, 16, "bf16")
    node = graph.node["h.0.attn.q"]
    assert graph.op(node).flops_of(graph.sizes(node), node.attrs) == 2 * 16 * 1024 * 16 * 128


def test_inverse_layer_scaling_and_own_inner_size(tmp_path: Path) -> None:
    path = write(tmp_path, GPT2, scale_attn_by_inverse_layer_idx=True, n_inner=50, activation_function="gelu", tie_word_embeddings=False, attn_pdrop=0.0)
    graph = load(path).graph(1, 8, "fp64")
    assert [graph.node[f"h.{i}.attn.attend"].attrs["scale"] for i in (0, 1)] == [6**-0.5, 6**-0.5 / 2]
    assert shape(graph, "h.1.mlp.up.weight") == (24, 50)
    assert graph.node["h.0.mlp.act"].attrs == {"approximate": "none"}
    assert graph.node["lm_head"].inputs[1] == "lm_head.weight"
    assert "p" not in graph.node["h.0.attn.attend"].attrs


# ---- what a config may leave out ---------------------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    old_llama = load(write(tmp_path, LLAMA, num_key_value_heads=..., rms_norm_eps=...)).config
    assert (old_llama.attention.num_kv_heads, old_llama.blocks[0].norm.eps, old_llama.tied) == (4, 1e-6, False)
    assert load(write(tmp_path, LLAMA, num_key_value_heads=None)).config.attention.num_kv_heads == 4
    gpt2 = load(write(tmp_path, GPT2)).config
    assert (gpt2.mlp.hidden, gpt2.tied, gpt2.blocks[0].dropout, gpt2.mlp.activation) == (96, True, 0.1, "gelu_tanh")
    qwen3 = load(write(tmp_path, LLAMA, model_type="qwen3")).config
    assert qwen3.attention.head_dim == 128


def test_a_folder_gives_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    write(folder, LLAMA)
    assert load(folder).name == load(folder / "config.json").name == "my_model"


def test_names_sources_and_paths_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    assert load(write(tmp_path, LLAMA)).fingerprint == load(write(tmp_path, {**LLAMA, "transformers_version": "4.0"})).fingerprint
    assert load(write(tmp_path, LLAMA)).fingerprint != load(write(tmp_path, LLAMA, rope_theta=5e5)).fingerprint
    assert load("gpt2").fingerprint != load("gpt2", residual_dropout=0.0).fingerprint


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {"sliding_window": None}, 0),
        ("mistral", {}, 4096),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, 0),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, 0),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, 8),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, 0),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, 8),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "num_hidden_layers": 1, "layer_types": ["full_attention", "sliding_attention"]}, 0),
        ("llama", {"sliding_window": 8}, 0),
    ],
)
def test_windows(tmp_path: Path, family: str, changes: dict[str, Any], window: int) -> None:
    assert load(write(tmp_path, LLAMA, model_type=family, **changes)).config.blocks[-1].attention.window == window


def test_layers_with_a_window_stand_between_others() -> None:
    model = load("mistral-7b", num_layers=1)
    assert model.max_seq == 32768
    assert model.graph(1, 8192, "bf16").node["h.0.attn.attend"].attrs["window"] == 4096


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama3-8b", "no model `llama3-8b`; near names in the zoo: llama-3-8b"),
        ("GPT2", "near names in the zoo: gpt2"),
        ("zzz", "the zoo has gpt2-tiny, gpt2"),
        ("meta-llama/Llama-3-8B", "names a model on a hub, and headrace fetches nothing: download the config .* near names in the zoo: llama-3-8b"),
        ("https://huggingface.co/gpt2", "download the config"),
        ("./nothing/config.json", "there is no file or folder `./nothing/config.json`"),
        ("nothing.json", "there is no file or folder"),
        ("model.onnx", "ONNX files are not read yet; accepted are a zoo name"),
        ("model.pt2", "torch.export files are not read yet"),
        ("", "no model was named"),
        ("gpt2[num_layers]", "`num_layers` in `.num_layers.` is no override"),
        ("gpt2[layers=2]", "`layers` cannot be overridden; near: num_layers"),
        ("gpt2[num_layers=two]", "n_layer is 'two'; it must be a whole number"),
        ("x" * 5000, "no model `xxxx"),
        ("a\0b", "no model"),
    ],
)
def test_names_that_are_refused(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load(name)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (json.dumps(LLAMA).encode()[:-20], "is no valid JSON: .* at line 1, column .*; is it cut off"),
        (b"{'model_type': 'gpt2'}", "is no valid JSON"),
        (b"[1, 2]", "holds a JSON list, not an object"),
        (b"null", "holds a JSON NoneType"),
        (b"\x80\x04\x95", "is no text file"),
        (b"[" * 100_000, "is no config.json: .*recursion"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is no config.json: .*digits"),
        (b" " * (1 << 23), "give the config, not the weights"),
        (b"{}", "no `model_type`"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        load(path)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "headrace never runs code from a config"),
        (LLAMA, {"model_type": "lama"}, "model_type 'lama' is not known; known are gpt2, llama, mistral, .*; did you mean llama"),
        (LLAMA, {"model_type": "mamba"}, "known are gpt2, llama"),
        (LLAMA, {"model_type": 7}, "model_type 7 is not known"),
        (LLAMA, {"hidden_size": ...}, "the size `hidden_size` is missing"),
        (LLAMA, {"hidden_size": 0}, "hidden_size is 0; it must be a whole number from 1"),
        (LLAMA, {"vocab_size": -5}, "vocab_size is -5"),
        (LLAMA, {"vocab_size": math.nan}, "vocab_size is nan"),
        (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        (LLAMA, {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA, {"num_hidden_layers": 10**9}, "whole number from 1 to 10000"),
        (LLAMA, {"num_attention_heads": 5}, "hidden_size = 24 is not divisible by num_attention_heads = 5; near .* 3, 4, 6"),
        (LLAMA, {"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3; legal are .1, 2, 4."),
        (LLAMA, {"head_dim": 5}, "head_dim is 5: .* must be even"),
        (LLAMA, {"head_dim": 0}, "head_dim is 0"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number above 0"),
        (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        (LLAMA, {"rope_theta": math.inf}, "rope_theta is inf"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "RoPE scaling of type 'longrope' is not built"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling of type 'dynamic'"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "the scaling of RoPE lacks `factor`"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "must be below"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "alike for all layers"),
        (LLAMA, {"rope_scaling": "linear"}, "the RoPE parameters are 'linear'"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA, {"hidden_act": "mish"}, "hidden_act is 'mish', an activation that headrace does not know; known are gelu"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        (LLAMA, {"attention_dropout": 1.0}, "attention_dropout is 1.0; it must be a probability"),
        (LLAMA, {"layer_types": ["full_attention", "linear_attention"]}, "`layer_types` has 'linear_attention'"),
        (LLAMA, {"vocab_size": "9" * 10_000}, "vocab_size is '9999.{,40}; it must be"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "`quantization_config`"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification ends in another head"),
        (GPT2, {"add_cross_attention": True}, "`add_cross_attention` is set"),
        (GPT2, {"n_head": 7}, "n_embd = 24 is not divisible by n_head = 7"),
        (GPT2, {"resid_pdrop": -0.1}, "resid_pdrop is -0.1"),
        (GPT2, {"embd_pdrop": math.nan}, "embd_pdrop is nan"),
        (GPT2, {"n_inner": -1}, "n_inner is -1"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    path = write(tmp_path, config, **changes)
    with pytest.raises(InputError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_auto_map_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(InputError, match="auto_map"):
        load(write(tmp_path, LLAMA, auto_map={"AutoConfig": "modeling_x.X"}))


@pytest.mark.parametrize(
    ("batch", "seq", "dtype", "error", "says"),
    [
        (1, 257, "fp32", GraphError, "seq is 257, but `gpt2-tiny` has 256 learned positions"),
        (0, 8, "fp32", GraphError, "batch is 0"),
        (2, -1, "fp32", GraphError, "seq is -1"),
        (math.nan, 8, "fp32", GraphError, "batch is nan"),
        (True, 8, "fp32", GraphError, "batch is True"),
        (1, 8, "fp12", InputError, "dtype `fp12` is not known"),
    ],
)
def test_microbatches_that_are_refused(batch: Any, seq: Any, dtype: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        load("gpt2-tiny").graph(batch, seq, dtype)


def test_graphs_and_fingerprints_do_not_depend_on_the_hash_seed() -> None:
    code = "from planner.frontends import load; m = load('gpt2-tiny'); print(m.fingerprint, m.graph(1, 4, 'fp32').fingerprint)"
    root = Path(__file__).parents[2]
    said = {subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": n}, cwd=root, capture_output=True, check=True).stdout for n in ("0", "1")}
    assert len(said) == 1


# ---- families ----------------------------------------------------------------------------------------------------------------------------------------


def crossing(graph: Graph, cut: int) -> set[str]:
    """Values that are made before a layer and read in it or later."""
    return {t for n in graph.nodes if n.layer >= cut for t in n.inputs if (p := graph.producer(t)) and p.layer < cut}


def test_a_cut_of_an_encoder_and_decoder_is_crossed_by_the_stream_and_what_is_carried() -> None:
    graph = load("t5-small").graph(2, 16, "fp32")
    assert [len(crossing(graph, cut)) for cut in range(1, graph.num_layers)] == [1] * 6 + [1] + [2] * 5 + [1]
    assert {graph.node[f"h.{i}.cross.k"].inputs[0] for i in range(3)} == {"enc.drop", "h.0.memory", "h.1.memory"}
    assert graph.node["h.0.attn.attend"].inputs[3] == "relative.weight"
    assert graph.node["enc.h.0.attn.attend"].attrs["causal"] is False


def test_extra_predictions_read_the_next_tokens_and_add_to_the_loss() -> None:
    graph = load("deepseek-tiny", extra_predictions=2).graph(2, 16, "fp32")
    assert [t.name for t in graph.inputs] == ["ids", "labels", "labels2", "labels3"]
    assert (graph.node["mtp.0.wte"].inputs[0], graph.node["mtp.1.wte"].inputs[0]) == ("labels", "labels2")
    assert (graph.node["mtp.0.loss.sums"].inputs[1], graph.node["mtp.1.loss.sums"].inputs[1]) == ("labels2", "labels3")
    assert graph.node["mtp.1.loss.weighed"].attrs == {"factor": 0.15}
    assert [len(crossing(graph, cut)) for cut in (4, 5, 6, 7)] == [1, 1, 2, 3]


def test_slots_of_experts_follow_the_capacity() -> None:
    for capacity, slots in ((1.0, 16), (1.5, 24), (4.0, 64), (100.0, 64)):
        graph = load("mixtral-tiny", capacity=capacity).graph(2, 64, "fp32")
        assert shape(graph, "h.0.mlp.dispatch") == (8, 2, slots, 128)


def test_layers_differ_where_the_config_says_so() -> None:
    gemma = load("gemma-3-1b", num_layers=6).graph(1, 8, "fp32")
    assert ["window" in gemma.node[f"h.{i}.attn.attend"].attrs for i in range(6)] == [True] * 5 + [False]
    assert [gemma.node[f"h.{i}.attn.q.rope"].attrs["theta"] for i in (4, 5)] == [1e4, 1e6]
    deepseek = load("deepseek-v3", num_layers=5).graph(1, 8, "fp32")
    assert ["h.2.mlp.router" in deepseek.node, "h.3.mlp.router" in deepseek.node] == [False, True]
    assert deepseek.node["h.0.attn.q.rope"].attrs["last"] is True


def test_an_image_has_the_sequence_of_its_patches() -> None:
    model = load("vit-b-16", num_layers=1)
    assert model.max_seq == 197
    assert shape(model.graph(2, 197, "fp32"), "lm_head") == (2, 1, 1000)
    with pytest.raises(GraphError, match=r"seq is 196, but .* reads images of 196 patches behind a class token: its seq is 197"):
        model.graph(2, 196, "fp32")


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("mixtral-8x7b", {"top_k": 9}, "top_k is 9; it must be a whole number from 1 to 8"),
        ("mixtral-8x7b", {"capacity": 0}, "capacity is 0; it must be a number above 0"),
        ("deepseek-v3", {"num_experts": 250}, "250 experts in 8 groups, 4 of them open: groups must divide the experts"),
        ("deepseek-v3", {"num_experts": 8}, "4 groups of 1 experts have fewer than the 8"),
        ("gpt2", {"capacity": 2}, "`capacity` cannot be overridden"),
        ("vit-b-16", {"patch_size": 15}, "image_size = 224 is not a multiple of patch_size = 15"),
        ("t5-small", {"activation": "gated-gated-relu"}, "feed_forward_proj is 'gated-gated-relu'"),
    ],
)
def test_overrides_that_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        load(name, **changes)


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        ({"model_type": "deepseek_v3"}, {"output_router_logits": True}, "`output_router_logits` is set; headrace builds deepseek without a balancing loss"),
        ({"model_type": "falcon"}, {"alibi": True}, "`alibi` is set; headrace builds falcon with rotary positions only"),
        ({"model_type": "phi"}, {"qk_layernorm": True}, "`qk_layernorm` is set"),
        ({"model_type": "bert"}, {"is_decoder": True}, "`is_decoder` is set; headrace builds bert as an encoder only"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 2}, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; headrace builds greedy"),
    ],
)
def test_families_say_what_they_do_not_build(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        load(write(tmp_path, {**LLAMA, **config}, **changes))
