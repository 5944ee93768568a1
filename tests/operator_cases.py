"""One case or more for every operator of the catalogue: sizes that 2 and 3 do not divide, and sizes that they divide."""

from __future__ import annotations

from tests.oracle import Case

UNEVEN = {
    "b": 3, "s": 5, "t": 3, "h": 7, "n": 4, "m": 5, "k": 3, "v": 8, "p": 7, "z": 5, "g": 4, "r": 2, "d": 2, "w": 3, "e": 5, "c": 2, "y": 4, "x": 6, "q": 3,
    "pair": 2,
}  # fmt: skip
EVEN = {
    "b": 6, "s": 6, "t": 6, "h": 6, "n": 6, "m": 6, "k": 6, "v": 12, "p": 12, "z": 6, "g": 6, "r": 2, "d": 2, "w": 3, "e": 6, "c": 6, "y": 4, "x": 6, "q": 6,
    "pair": 2,
}  # fmt: skip


def _both(name: str, attrs: dict | None = None, of: dict | None = None, **more: object) -> list[Case]:
    """`of`: other sizes of some labels."""
    composite = {"h": 4} if name.startswith(("rope", "head_norm", "split_heads", "merge_heads", "append_to_heads")) else {}
    return [Case(name, {**UNEVEN, **composite, **(of or {})}, attrs or {}, **more), Case(name, {**EVEN, **(of or {})}, attrs or {}, **more)]  # type: ignore[arg-type]


def _with_grads(name: str, grads: str, attrs: dict | None = None, **more: object) -> list[Case]:
    return [case for each in (name, *(f"{name}.{grad}" for grad in grads.split())) for case in _both(each, attrs, **more)]


def _uneven(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.sizes["b"] == UNEVEN["b"]]


DROP = {"p": 0.3, "salt": 5}
LLAMA3 = {"theta": 50.0, "factor": 8.0, "low": 1.0, "high": 4.0, "original": 16.0}
RING = {"causal": True, "parts": 6}
YARN = {"theta": 50.0, "factor": 8.0, "original": 16.0, "fast": 2.0, "slow": 0.5, "truncate": False}
CLIP = {"lr": 0.1, "max_norm": 0.5, "weight_decay": 0.1}
EXPERT = {"expert": "e"}
NORMS = {"pair": 2}
CODES = {"mc": "v", "vc": "v"}
IDS = {"ids": "v"}
LABELS = {"labels": "v"}
PARTS = {"p": 6, "e": 2, "v": 12}

CASES: tuple[Case, ...] = tuple(
    case
    for group in (
        _with_grads("linear", "dx dw"), _with_grads("linear", "dx dw", leading=1), _with_grads("linear_t", "dx dw"),
        _with_grads("matmul", "dx dw"), _with_grads("batched_matmul", "dx dw"),
        _with_grads("add", "dx dy"), _with_grads("add", "dx dy", leading=0), _with_grads("bias", "dx dc"), _with_grads("add_positions", "dx dy"),
        _with_grads("scale", "dx", {"factor": -1.7}), _with_grads("mul", "dx dy"),
        _with_grads("gelu", "dx", {"approximate": "tanh"}), _with_grads("gelu", "dx", {"approximate": "none"}), _with_grads("silu", "dx"),
        _with_grads("relu", "dx"), _with_grads("sigmoid", "dx"), _with_grads("softcap", "dx", {"cap": 0.8}),
        _with_grads("clamped_swiglu", "grad", {"alpha": 1.7, "limit": 0.7}), _with_grads("shares", "dx", {"eps": 0.1}, positive=("x",)),
        _with_grads("top_k", "dscores", integers=EXPERT), _both("top_k_moved", {"groups": 3, "top_groups": 2, "of_group": 2}, of={"e": 6}),
        _with_grads("expert_load", "dprobs", integers=EXPERT), _with_grads("balance", "dmass", {"factor": 0.7}), _with_grads("spread", "dx"),
        _with_grads("dispatch", "dx", integers=EXPERT), _with_grads("combine", "dy dweight", integers=EXPERT), _with_grads("grouped_linear", "dx dw"),
        _with_grads("expert_bias", "dx dbias"), _with_grads("carry", "dx"),
        _both("patches", of={"i": 2, "j": 3, "y": 4, "x": 3}), _with_grads("prepend", "dx dtoken", of={"t": 6, "s": 5}),
        _with_grads("pick", "dx", of={"t": 1}), _with_grads("append_to_heads", "dx dy", of={"m": 2, "k": 3, "n": 5}),
        _with_grads("swiglu", "grad"), _with_grads("dropout", "dx", DROP), _with_grads("split_heads", "dx"), _with_grads("merge_heads", "dx"),
        _with_grads("transpose", "dx"), _with_grads("transpose", "dx", leading=1),
        _with_grads("layer_norm", "dx dgc", {"eps": 1e-5}, positive=("rstd",)), _with_grads("rms_norm", "dx dg", {"eps": 1e-5}, positive=("rstd",)),
        _with_grads("head_norm", "dx dg", {"eps": 1e-5}, positive=("rstd",)), _with_grads("softmax", "dx"),
        _uneven(_with_grads("attention", "grad", {"causal": True, "zigzag": 2, "window": 5, **DROP}, of={"s": 8, "z": 8})),
        _uneven(_with_grads("attention_part", "grad", {**RING, "turn": 1, "zigzag": 2}, of={"s": 12})),
        _uneven(_with_grads("rope", "dx", {"theta": 10.0, "zigzag": 2}, of={"s": 8})), _uneven(_both("dropout", {**DROP, "zigzag": 2}, of={"s": 8})),
        _uneven(_with_grads("positions", "dtable", {"zigzag": 2}, of={"s": 8, "p": 10})),
        _with_grads("attention", "grad", {"causal": True}), _uneven(_with_grads("attention", "grad", {"causal": False, "scale": 0.4})),
        _uneven(_with_grads("attention", "grad", {"causal": True, **DROP})),
        _uneven(_with_grads("attention", "grad", {"causal": True, "window": 2, "softcap": 1.5})),
        _uneven(_with_grads("attention_sinks", "dsinks", {"causal": True, "window": 3})),
        _uneven(_with_grads("attention_masked", "grad", {"causal": False}, integers={"mask": "d"})),
        _uneven(_with_grads("attention_relative", "grad", {"causal": False, "max_distance": 6})),
        _uneven(_both("attention_relative", {"causal": True, "max_distance": 6, "scale": 1.0})),
        *(_with_grads("attention_part", "grad", {**RING, **more}, of={"s": 12}) for more in ({"turn": 0}, {"turn": 2}, {"turn": 1, "window": 3, **DROP})),
        _both("join_parts"),
        _both("shift", {"parts": 2}, of={"s": 6}), _both("shift", {"parts": 6, "inner": 3}, of={"s": 12}),
        _both("shift", {"parts": 6, "inner": 2, "of_blocks": True}, of={"s": 12}),
        _uneven(_with_grads("attention_part", "grad", {**RING, "turn": 3, "inner": 2}, of={"s": 12})),
        _with_grads("rope", "dx", LLAMA3), _with_grads("rope", "dx", {"theta": 10.0}),
        _uneven(_with_grads("rope", "dx", {**YARN, "turned": 4, "last": True, "interleaved": True, "amplitude": 1.3}, of={"d": 6})),
        _with_grads("embedding", "dtable", integers=IDS), _with_grads("positions", "dtable"),
        _with_grads("cross_entropy", "dlogits", integers=LABELS), _both("last_max"), _with_grads("exp_sum", "dlogits", integers=LABELS),
        _with_grads("head_lse", "grad", {"chunks": 3}, of=PARTS, integers=LABELS), _with_grads("lse_loss", "dlse dt"),
        _with_grads("head_lse_bias", "grad", {"chunks": 4, "cap": 1.3}, of=PARTS, integers=LABELS),
        _uneven(_with_grads("head_lse_frozen", "grad", {"chunks": 2, "cap": 0.7}, of=PARTS, integers=LABELS)),
        _uneven(_with_grads("head_lse_bias_frozen", "grad", {"chunks": 20}, of=PARTS, integers=LABELS)),
        _with_grads("log_loss", "dz dt", positive=("z",)), _with_grads("total", "dx", {"factor": 0.3}), _both("fill", {"value": 2.5}),
        _with_grads("row_sum", "dx"), _both("row_max"), _both("sum_squares"), _both("sum_squares", leading=1),
        _both("adamw", CLIP, positive=("norm2", "v")), _both("sgd", {**CLIP, "momentum": 0.9}, positive=("norm2",)), _both("cast", {"dtype": "float64"}),
        _both("sgd", {**CLIP, "momentum": 0.9, "nesterov": True}, positive=("norm2",)), _both("plain_sgd", CLIP, positive=("norm2",)),
        _both("lamb_norms", {**CLIP, **NORMS}, positive=("norm2", "v")), _both("lamb", {**CLIP, **NORMS}, positive=("norm2", "norms", "v")),
        _both("adafactor_sums", CLIP, positive=("norm2",), leading=1), _both("adafactor_mean", CLIP, positive=("norm2",), leading=1),
        _both("adafactor_norms", {**CLIP, **NORMS}, positive=("norm2", "r1", "c1", "mean", "r", "c"), leading=0),
        _both("adafactor", {**CLIP, **NORMS}, positive=("norm2", "r1", "c1", "mean", "norms", "r", "c"), leading=0),
        _uneven(_both("adafactor", {**CLIP, **NORMS}, positive=("norm2", "r1", "c1", "mean", "norms", "r", "c"), leading=1)),
        _both("adafactor_rows", CLIP), _both("adafactor_columns", CLIP),
        _both("adafactor_vector_norms", {**CLIP, **NORMS}, positive=("norm2", "v"), leading=1),
        _both("adafactor_vector", {**CLIP, **NORMS}, positive=("norm2", "norms", "v"), leading=1),
        _both("muon_direction", CLIP, positive=("norm2",), leading=1), _both("orthogonalize", leading=1), _both("muon", CLIP, positive=("norm2",), leading=1),
        *(_both(f"{name}.of2", {"first": 2}, of={"k": k}, leading=1) for name in ("stack", "unstack") for k in (3, 5)),
        _both("adamw8bit", CLIP, positive=("norm2", "ms", "vs"), integers=CODES, leading=1),
    )
    for case in group
)  # fmt: skip
