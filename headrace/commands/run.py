"""`headrace run`: trains as planned, on this machine."""

from __future__ import annotations

from argparse import Namespace

from headrace import running
from headrace.answer import Answer
from headrace.documents import check_writable
from headrace.progress import Progress
from headrace.tables import Shown, Table
from headrace.timelines import write_timeline
from ir.units import nbytes, seconds

DISAGREES, INTERRUPTED = 1, 130


def answer(args: Namespace, progress: Progress) -> Answer:
    check_writable(args.timeline)

    def tell(step: int, of: int, loss: float, what: str = "trained") -> None:
        progress(f"{what} step {step} of {of}: loss {loss:.4f}")

    outcome = running.run(
        args.plan, steps=args.steps, data=args.data, lr=args.lr, warmup=args.warmup, seed=args.seed, backend=args.backend, verify=args.verify,
        checkpoint=args.checkpoint, resume=args.resume, progress=tell,
    )  # fmt: skip
    if args.timeline:
        write_timeline(args.timeline, outcome.run.timeline, outcome.run.program)
    if outcome.run.interrupted:
        return Answer(outcome.document(), _shown(outcome, args), INTERRUPTED, f"interrupted after {len(outcome.run.loss)} of {args.steps} steps")
    if not outcome.agrees:
        return Answer(outcome.document(), _shown(outcome, args), DISAGREES, f"the plan does not compute what one device computes: {parity(outcome)}")
    return Answer(outcome.document(), _shown(outcome, args))


def parity(outcome: running.Outcome) -> str:
    """How far the run was from one device, in a line."""
    found = outcome.verified
    if found is None:
        return "not verified"
    return (
        f"{found['steps']} steps against one device: losses within {found['loss_max_rel']:.2g}, gradients within {found['grad_max_rel']:.2g} (relative; "
        f"largest at {found['grad_worst']})"
    )


def _shown(outcome: running.Outcome, args: Namespace) -> tuple[Shown, ...]:
    run, document = outcome.run, outcome.document()
    losses = Table("", (">step", ">loss"), tuple((str(run.first_step + i), f"{loss:.4f}") for i, loss in enumerate(run.loss, 1)))
    predicted = document["predicted_step_s"]
    told = f" (predicted {seconds(predicted)}, {predicted / run.step_s:.2f} of it)" if predicted and run.step_s else ""
    sent = run.messages
    lines = (
        f"step {seconds(run.step_s)}{told}; {sent['collectives']:.0f} collectives and {sent['p2p']:.0f} messages moved {nbytes(sent['nbytes'])}, "
        f"{100 * run.overlap:.0f} % of their time behind computation",
        *((parity(outcome),) if outcome.verified is not None else ()),
        *((f"wrote {args.timeline}",) if args.timeline else ()),
        *((f"wrote a checkpoint to {args.checkpoint}",) if args.checkpoint and not run.interrupted else ()),
    )
    return (losses, *lines) if run.loss else lines
