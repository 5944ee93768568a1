"""`headrace calibrate`: a cluster corrected by what was measured on it."""

from __future__ import annotations

from argparse import Namespace

from headrace import planning
from headrace.answer import Answer
from headrace.calibration import calibrate
from headrace.documents import SCHEMA_VERSION, check_writable, write_json
from headrace.progress import Progress


def answer(args: Namespace, progress: Progress) -> Answer:
    check_writable(args.output)
    cluster = planning.load_cluster(args.cluster, progress)
    progress(f"calibrating {cluster.name}")
    found = calibrate(cluster, args.plan, args.step_s, tuple(args.measured or ()))
    write_json(args.output, found.cluster.to_json())
    levels = dict(found.cluster.profile.get("levels", {}))
    document = {
        "schema_version": SCHEMA_VERSION, "kind": "calibration", "cluster": {"name": found.cluster.name, "fingerprint": found.cluster.fingerprint},
        "levels": levels, "error_before": found.before, "error_train": found.train, "error_test": found.test,
        "outliers": dict(found.outliers), "path": args.output,
    }  # fmt: skip
    shared = () if args.step_s is None else (_shared(found.level, found.cluster.profile["steps"]["level"]),)
    told = ", ".join(f"{name} {value:.3g}" for name, value in sorted(levels.items())[:8])
    test = "nothing was kept back to test on" if found.test is None else f"{100 * found.test:.1f} % on what was kept back"
    odd = tuple(
        f"{name} takes {ratio:.1f} times its price, all else does not: look for its kernel or link; not corrected" for name, ratio in found.outliers.items()
    )
    lines = (
        *odd,
        f"step predicted off by {100 * found.before:.1f} % before, {100 * found.train:.1f} % on what was fitted, {test}",
        *shared,
        f"everything takes so many times what it was priced: {told}" + (f" and {len(levels) - 8} more" if len(levels) > 8 else ""),
        f"wrote {args.output}; name it as CLUSTER: headrace simulate MODEL {args.output}",
    )
    return Answer(document, lines)


def _shared(own: float, level: float) -> str:
    return f"this plan takes {own:.3g} times what it was priced; of that all others share {level:.3g}, as far as runs of one family share it on such a GPU"
