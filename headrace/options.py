"""The surface of the command: verbs, options, what each option accepts, an example for each verb."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from headrace import __version__
from headrace.documents import near
from ir.errors import InputError
from ir.units import DTYPE_ALIASES, DTYPE_BYTES, dtype_name, is_floating

FIX_KEYS = (
    "dp", "tp", "pp", "cp", "cp_form", "cp_order", "ep", "vpp", "mbs", "schedule", "seq_chunks", "loss_chunks", "recompute", "zero", "sp", "layout", "tp_plan",
)  # fmt: skip
FIX_HELP = (
    "what the plan must keep, of dp tp pp cp ep vpp mbs schedule zero sp, recompute (none, selective, full), cp_form (how attention goes over cp ranks: ring, "
    "gather, exchange), cp_order (zigzag, contiguous), seq_chunks (pieces that seq1f1b cuts a causal sequence into), loss_chunks (of a rank's tokens, "
    "for head and loss one after the other), layout and tp_plan (placements of Mesh-TensorFlow and of transformers), and placements of tensors, such "
    "as h.*.mlp.up=[tp:S(2)]"
)
FIX_COUNTS = ("dp", "tp", "pp", "cp", "ep", "vpp", "mbs", "seq_chunks", "loss_chunks")
OPTIMIZERS = ("adamw", "sgd", "lamb", "adafactor", "adamw8bit", "muon")
BACKENDS = ("numpy", "cupy", "null")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is an InputError: one sentence, exit code 2."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (`{self.prog} --help` shows what it takes)")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of one call; `verb` names the command. Raises InputError; `--help` prints and exits."""
    top = parser()
    verbs = verb_parsers(top)
    words = [word for word in argv if not word.startswith("-")]
    if words and argv[0] == words[0] and words[0] not in verbs:
        raise InputError(f"`{words[0]}` is no command of headrace{near(words[0], verbs)}. Commands are {', '.join(verbs)}")
    args, unknown = top.parse_known_args(argv)
    if unknown:
        sub = verbs[args.verb]
        if not unknown[0].startswith("-"):
            raise InputError(f"`{unknown[0]}` is a word too many for `{sub.prog}` (`{sub.prog} --help` shows what it takes)")
        known = [o for action in sub._actions for o in action.option_strings]
        raise InputError(f"`{unknown[0]}` is no option here{near(unknown[0].split('=')[0], known)} (`{sub.prog} --help` shows what it takes)")
    return args


def parser() -> Parser:
    """The whole surface; nothing of numpy, scipy, networkx or rich is imported for it."""
    top = Parser(prog="headrace", description="Plans the distributed training of a model before anything runs, foretells it, and runs it.", epilog=_TOP_EXAMPLE)
    top.add_argument("--version", action="version", version=f"headrace {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="COMMAND", required=True, parser_class=Parser)
    for name, (summary, example, arguments) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=f"example:\n  {example}")
        arguments(verb)
        verb.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else there")
    return top


def verb_parsers(top: Parser) -> Mapping[str, Parser]:
    """The parser of each command by its name."""
    actions = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(actions[0].choices)


# ---- what an option accepts ------------------------------------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """A whole number, 1 or more.

    >>> count("512")
    512
    """
    if not re.fullmatch(r"\+?\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no count: give a whole number, 1 or more")
    return int(text)


def port(text: str) -> int:
    """A TCP port."""
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"`{text}` is no port: give a whole number from 1 to 65535")
    return int(text)


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    if not re.fullmatch(r"\+?\d+", text):
        raise argparse.ArgumentTypeError(f"`{text}` is no number that counts: give a whole number, 0 or more")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not above 0: give a finite number above 0")
    return value


def fraction(text: str) -> float:
    """A number above 0, at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no fraction: give a number above 0 and at most 1, for example 0.95")
    return value


def duration(text: str) -> float:
    """Seconds from `30s`, `2m`, `1h` or a bare number of seconds.

    >>> duration("30s"), duration("2m"), duration("0.5")
    (30.0, 120.0, 0.5)
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    unit = text[-1:] if text[-1:] in units else ""
    value = _number(text.removesuffix(unit) if unit else text) * units.get(unit, 1.0)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"`{text}` is no duration: give seconds above 0, for example 30s or 2m")
    return value


def dtype(text: str) -> str:
    """The canonical name of a floating point dtype."""
    try:
        name = dtype_name(text)
    except InputError as error:
        known = ", ".join(sorted(n for n in (*DTYPE_BYTES, *DTYPE_ALIASES) if is_floating(dtype_name(n))))
        raise argparse.ArgumentTypeError(f"dtype `{text}` is not known; known are {known}") from error
    if not is_floating(name):
        raise argparse.ArgumentTypeError(f"`{text}` holds no weights: give a floating point dtype such as bf16 or fp32")
    return name


def optimizer(text: str) -> str | dict[str, Any]:
    """The name of an optimizer, or a mapping of its name and the settings behind it; which settings there are, the planner knows.

    >>> optimizer("lamb"), optimizer("sgd:momentum=0,nesterov=false")
    ('lamb', {'name': 'sgd', 'momentum': 0, 'nesterov': False})
    """
    name, colon, rest = text.partition(":")
    if name not in OPTIMIZERS:
        raise argparse.ArgumentTypeError(f"optimizer `{name}` is not known{near(name, OPTIMIZERS)}. Known are {', '.join(OPTIMIZERS)}")
    if not colon:
        return name
    found: dict[str, Any] = {"name": name}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not key or not value or key in found:
            raise argparse.ArgumentTypeError(f"`{part}` is no setting, or given twice; for example {name}:lr=0.001,weight_decay=0.1")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def fix(text: str) -> dict[str, str | int]:
    """`key=value` pairs that the search must keep.

    >>> fix("tp=2,schedule=1f1b"), fix("lm_head.weight=[dp:B,tp:S(0)]")
    ({'tp': 2, 'schedule': '1f1b'}, {'lm_head.weight': '[dp:B,tp:S(0)]'})
    """
    found: dict[str, str | int] = {}
    for part in filter(None, (p.strip() for p in re.split(r",(?![^\[]*\])", text))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not key or not value:
            raise argparse.ArgumentTypeError(f"`{part}` is no key=value; for example tp=2,pp=4")
        if key in found:
            raise argparse.ArgumentTypeError(f"`{key}` is given twice: {found[key]} and {value}")
        found[key] = _fixed(key, value)
    if not found:
        raise argparse.ArgumentTypeError("nothing is fixed; for example tp=2,pp=4")
    return found


def _fixed(key: str, value: str) -> str | int:
    if value.startswith("["):
        return value
    if key not in FIX_KEYS:
        raise argparse.ArgumentTypeError(
            f"`{key}` cannot be fixed{near(key, FIX_KEYS)}. Keys are {', '.join(FIX_KEYS)}, and tensors, as in lm_head.weight=[tp:S(0)]"
        )
    if key in FIX_COUNTS and (not value.isdecimal() or int(value) < 1):
        raise argparse.ArgumentTypeError(f"`{key}={value}`: give a whole number, 1 or more")
    if key == "zero" and value not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"`zero={value}`: give 0, 1, 2 or 3")
    return int(value) if value.isdecimal() else value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"`{text}` is no number") from error
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"`{text}` is not finite: give a finite number")
    return value


# ---- the verbs -------------------------------------------------------------------------------------------------------------------------------------


def _workload(p: Parser) -> None:
    p.add_argument("model", metavar="MODEL", help="a zoo name (`headrace models`), a Hugging Face config.json or its folder")
    p.add_argument("cluster", metavar="CLUSTER", help="`local`, NODESxGPUSxNAME such as 4x8xH100-SXM, a machine name (`headrace clusters`), or a cluster JSON")
    p.add_argument("--batch", "--global-batch", type=count, metavar="N", default=None, help="global batch in sequences (default: 8 a device)")
    p.add_argument("--seq", type=count, metavar="N", default=None, help="tokens of a sequence (default: the model's longest)")
    p.add_argument("--dtype", type=dtype, default=None, help="of weights and activations (default: bf16, fp16 where a device has no bf16, on `local` fp32)")
    names = ", ".join(OPTIMIZERS)
    p.add_argument("--optimizer", type=optimizer, metavar="NAME[:K=V,...]", default="adamw", help=f"{names}; with settings: adamw:beta2=0.99 (default: adamw)")
    p.add_argument("--lora", metavar="K=V,...", help="train adapters beside frozen products only, such as rank=16,alpha=32,targets=q,v (or PEFT's own keys)")
    p.add_argument("--freeze", metavar="PATTERN,...", help="parameters that are not trained, such as wte*,h.0.*")
    p.add_argument("--fix", type=fix, metavar="K=V,...", default={}, help=FIX_HELP)
    p.add_argument("--moe-imbalance", type=positive, metavar="X", default=None, help="what the busiest expert gets, in even shares (default: 1)")
    p.add_argument("--stages", metavar="LAYOUT", default=None, help="blocks of each pipeline stage, as in 11,10,11, or Megatron-LM's Et*3|(tt|)*4|L")
    p.add_argument("--memory-fraction", type=fraction, metavar="X", default=0.95, help="of usable device memory that a plan may fill (default: 0.95)")
    p.add_argument("--budget", type=duration, metavar="T", default=30.0, help="longest time to search, such as 30s (default: 30s)")


def _plan(p: Parser) -> None:
    _workload(p)
    p.add_argument("--top", type=count, metavar="K", default=5, help="how many plans to show (default: 5)")
    p.add_argument("--strict", action="store_true", help="exit with 3 when the best plan fits only within the risk band")
    p.add_argument("-o", "--output", metavar="FILE", help="write the best plan")


def _simulate(p: Parser) -> None:
    _workload(p)
    p.add_argument("--plan", metavar="FILE", help="the plan to simulate, instead of the best one that keeps --fix")
    p.add_argument("--trace", metavar="FILE", help="write the timeline for Perfetto (ui.perfetto.dev)")
    p.add_argument("--timeline", metavar="FILE", help="write the predicted timeline, for `headrace diff`")


def _check(p: Parser) -> None:
    p.add_argument("plan", metavar="plan.json")
    p.add_argument("--cluster", metavar="CLUSTER", help="the cluster to check it on (default: the one that it was made for)")
    p.add_argument("--strict", action="store_true", help="exit with 3 when the plan fits only within the risk band")


def _explain(p: Parser) -> None:
    p.add_argument("plan", metavar="plan.json")
    p.add_argument("--why-not", type=fix, metavar="K=V,...", help="a layout or placements to compare with, such as tp=8,pp=2")
    p.add_argument("--about", metavar="NAMES", help="an operator or parameter, such as h.*.mlp.up: why it is not placed otherwise")
    p.add_argument("--against", metavar="other.json", help="another plan of the same model, compared tensor by tensor")


def _lower(p: Parser) -> None:
    p.add_argument("plan", metavar="plan.json")
    p.add_argument("-o", "--output", metavar="FILE", required=True, help="write the program")


def _run(p: Parser) -> None:
    p.add_argument("plan", metavar="plan.json|program.json")
    p.add_argument("--steps", type=count, metavar="N", default=10, help="(default: 10)")
    p.add_argument("--data", metavar="FILE", help="any text file; its bytes are the tokens (default: the sources of Python's library)")
    p.add_argument("--lr", type=positive, metavar="X", help="learning rate (default: the plan's)")
    p.add_argument("--warmup", type=whole, metavar="N", default=0, help="steps over which the learning rate rises (default: 0)")
    p.add_argument("--seed", type=whole, metavar="N", default=0, help="of weights, data and dropout (default: 0)")
    p.add_argument("--backend", choices=BACKENDS, default="numpy", help="(default: numpy)")
    p.add_argument("--verify", action="store_true", help="run the first steps on one device too, and compare losses and gradients")
    p.add_argument("--checkpoint", metavar="DIR", help="write weights and optimizer state there at the end")
    p.add_argument("--resume", metavar="DIR", help="go on from a checkpoint, of whichever plan")
    p.add_argument("--timeline", metavar="FILE", help="write the measured timeline, for `headrace diff`")


def _diff(p: Parser) -> None:
    p.add_argument("predicted", metavar="predicted.json")
    p.add_argument("measured", metavar="measured.json")
    p.add_argument("--trace", metavar="FILE", help="write both timelines side by side for Perfetto (ui.perfetto.dev)")


def _measure(p: Parser) -> None:
    p.add_argument("-o", "--output", metavar="FILE", help="write the cluster there, instead of where `local` is kept")


def _calibrate(p: Parser) -> None:
    p.add_argument("cluster", metavar="CLUSTER", help="the cluster to correct")
    p.add_argument("--plan", metavar="FILE", required=True, help="the plan that was run on it")
    p.add_argument("--step-s", type=positive, metavar="X", help="seconds that one of its steps took")
    p.add_argument("--measured", nargs="+", metavar="FILE", help="measured timelines (`headrace run --timeline`); the last one is kept back to test on")
    p.add_argument("-o", "--output", metavar="FILE", required=True, help="write the corrected cluster")


TABLES = (
    "a table of runs, one a line, its first line naming the columns: id, family, arch (gpt, llama, moe, moe-mla), layers, hidden, heads, seq, gpu, n_gpus, "
    "tp, pp, dp, gbs, schedule, precision, and as far as known release, machine, mbs, recompute, iter_time_s or another measurement (default: the bundled runs)"
)
"""What `validate` reads."""


def _validate(p: Parser) -> None:
    p.add_argument("runs", metavar="RUNS.csv", nargs="?", help=TABLES)


def _profile(p: Parser) -> None:
    p.add_argument("action", choices=("import", "doctor"), help="`import` writes a cluster, `doctor` says what is odd about the figures")
    p.add_argument("files", metavar="FILE", nargs="+", help="output of nccl-tests, `nvidia-smi topo -m`, p2pBandwidthLatencyTest, or NCCL's topology XML")
    p.add_argument("--gpu", metavar="NAME", help="the GPU, where no file names it")
    p.add_argument("--nodes", type=count, metavar="N", help="nodes of the cluster (default: as many as the files say, or 1)")
    p.add_argument("--nic", metavar="NIC", help="NICs of a node, as after the @ of a cluster: ib400x8")
    p.add_argument("-o", "--output", metavar="FILE", help="write the cluster")


def _nothing(p: Parser) -> None:
    pass


def _ui(p: Parser) -> None:
    p.add_argument("--port", type=port, metavar="N", default=8501, help="(default: 8501)")
    p.add_argument("--headless", action="store_true", help="do not open a browser")


_TOP_EXAMPLE = """example:
  headrace plan gpt2 local --batch 8 --seq 256 -o plan.json
  headrace run plan.json --steps 10 --verify

`headrace COMMAND --help` shows the options of a command and an example."""

VERBS: Mapping[str, tuple[str, str, Callable[[Parser], None]]] = {
    "plan": ("search the best ways to train a model on a cluster", "headrace plan gpt2 4x8xH100-SXM --batch 512 --seq 1024 -o plan.json", _plan),
    "simulate": (
        "foretell a step: time, breakdown, memory",
        "headrace simulate gpt2 1x8xH100-SXM --batch 64 --seq 1024 --fix tp=2 --trace trace.json",
        _simulate,
    ),
    "check": ("prove that a plan is legal, fits and cannot deadlock", "headrace check plan.json --cluster 1x8xH100-SXM", _check),
    "explain": ("say what binds a plan and why others lose", "headrace explain plan.json --why-not tp=8,pp=1", _explain),
    "lower": ("write the program that a plan stands for", "headrace lower plan.json -o program.json", _lower),
    "run": ("train as planned, on this machine", "headrace run plan.json --steps 10 --verify --json", _run),
    "diff": ("lay a measured timeline on a predicted one", "headrace diff predicted.json measured.json --trace both.json", _diff),
    "measure": ("measure this machine, which `local` then stands for", "headrace measure -o cluster.json", _measure),
    "calibrate": ("correct a cluster by what was measured on it", "headrace calibrate 1x8xH100-SXM --plan plan.json --step-s 0.42 -o cluster.json", _calibrate),
    "validate": ("compare predictions with measured runs", "headrace validate runs.csv --json", _validate),
    "profile": ("make a cluster of what other tools measured", "headrace profile import topo.txt all_reduce.txt -o cluster.json", _profile),
    "models": ("list the models that are known by name", "headrace models", _nothing),
    "clusters": ("list the devices and machines that are known by name", "headrace clusters", _nothing),
    "ui": ("open the page in a browser", "headrace ui --port 8501 --headless", _ui),
}
