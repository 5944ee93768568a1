"""What is fitted to which runs, and what was found: studies and their members, classes of GPUs, the shares and the band of any run.

`studies.json` says what is fitted (by hand); `simulator/profiles/fits.json` what was found (written by `benchmarks/accuracy.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ir.errors import InputError
from planner.recipes.level import Level
from planner.recipes.run import Run
from planner.recipes.shares import Shares
from simulator.profile import gpu_profile

ENOUGH = 8
"""Measured runs of one GPU, release and machine from which on their own residuals are the band."""


@dataclass(frozen=True, slots=True)
class Member:
    """A GPU, the beginning of a release's name, and a machine."""

    gpu: str
    release: str
    machine: str

    def has(self, run: Run) -> bool:
        return run.machine == self.machine and _canonical(run.gpu) == _canonical(self.gpu) and run.release.startswith(self.release)

    def __str__(self) -> str:
        return f"{self.gpu}, {self.release}, {self.machine}"


@dataclass(frozen=True, slots=True)
class Study:
    """Runs that are fitted together: shares in `common` are one number for all members, those in `own` one for each member."""

    name: str
    members: tuple[Member, ...]
    common: tuple[str, ...]
    own: tuple[str, ...]
    expected: Mapping[str, float]

    @property
    def num_shares(self) -> int:
        """Fitted numbers that count for one member."""
        return len(self.common) + len(self.own)

    @property
    def start(self) -> Shares:
        return Shares().with_(self.expected)

    def member_of(self, run: Run) -> int | None:
        """The member whose run this is; the longest release counts where several begin alike."""
        found = [(len(m.release), i) for i, m in enumerate(self.members) if m.has(run)]
        return max(found)[1] if found else None


@dataclass(frozen=True, slots=True)
class Fitted:
    """The shares that count for a run; `band` half-width of 80 % of the logarithms of measured over predicted; `basis` whence both."""

    shares: Shares
    band: float
    basis: str


@cache
def studies() -> tuple[Study, ...]:
    """All studies, in the order in which they are shown."""
    return tuple(
        Study(s["name"], tuple(Member(**m) for m in s["members"]), tuple(s["common"]), tuple(s["own"]), s.get("expected", {})) for s in _spec()["studies"]
    )  # fmt: skip


def class_of(gpu: str) -> str:
    """The class of a GPU; "" where there is none.

    >>> class_of("A100-SXM-40GB"), class_of("GB200-NVL72"), class_of("T4")
    ('A100', 'Blackwell', '')
    """
    return next((c["name"] for c in _spec()["classes"] if any(_canonical(gpu).startswith(g) for g in c["gpus"])), "")


@cache
def _canonical(gpu: str) -> str:
    """A GPU's name as its profile has it, its own where it has none."""
    try:
        return gpu_profile(gpu)[0]
    except InputError:
        return gpu


def framework_of(release: str) -> str:
    """The framework of a release; "" where nothing of it was measured.

    >>> framework_of("Megatron-Bridge 26.04"), framework_of("of my own")
    ('Megatron-Core', '')
    """
    return next((f["name"] for f in _spec()["frameworks"] if any(release.startswith(r) for r in f["releases"])), "")


def class_shares() -> tuple[str, ...]:
    """What is fitted for a whole class of GPUs."""
    return tuple(_spec()["class_shares"])


def framework_shares() -> tuple[str, ...]:
    """Of these, in what a framework differs from others on any GPU: what it fuses, hides and quantizes. Big products and attention are the device's."""
    return tuple(_spec()["framework_shares"])


def study_of(run: Run, among: Sequence[Study] | None = None) -> tuple[Study, int] | None:
    """The study and member to which a run belongs: of the longest release that its own begins with."""
    found = [(len(s.members[i].release), s, i) for s in (among or studies()) if (i := s.member_of(run)) is not None]
    return max(found, key=lambda f: f[0])[1:] if found else None


@cache
def fits() -> Mapping[str, Any]:
    """What was found: `simulator/profiles/fits.json`."""
    found: Mapping[str, Any] = json.loads(resources.files("simulator").joinpath("profiles", "fits.json").read_text("utf-8"))
    return found


def fitted(run: Run, learned: Mapping[str, Any] | None = None) -> Fitted:
    """Shares and band of a run: of its GPU, release and machine where they were measured, else of its GPU's class, else of all, times its framework's.

    `learned`: what to take them from, in place of `fits`.
    """
    learned, own = learned or fits(), study_of(run)
    if own is None:
        width, basis = class_band(run.gpu, learned=learned)
        times = learned["frameworks"].get(framework_of(run.release), {})
        whole = {name: value * times.get(name, 1.0) for name, value in _class(run.gpu, learned)["shares"].items()}
        return Fitted(Shares().with_(whole), width, basis)
    study, i = own
    found = learned["members"][str(study.members[i])]
    shares = Shares().with_(found["shares"])
    if found["runs"] >= ENOUGH:
        return Fitted(shares, found["band"], f"cross-validated on {found['runs']} runs of this GPU, release and machine")
    return Fitted(shares, *class_band(run.gpu, found["runs"], learned=learned))


def class_band(gpu: str, runs: int = 0, levelled: bool = False, learned: Mapping[str, Any] | None = None) -> tuple[float, str]:
    """(half-width, basis) for a GPU with so few runs of the same release and machine: of families left out of its class.

    `levelled`: once one measured step has fixed the level.
    """
    learned, kind = learned or fits(), class_of(gpu)
    whole = _class(gpu, learned)
    said = f"class {kind}" if kind in learned["classes"] else "all GPUs, none of its class being measured"
    if levelled:
        return whole["band_after_one"], f"left-out families of {said}, one measured step of each fixing its level"
    few = f"only {runs} run{'s' * (runs > 1)}" if runs else "no run"
    return whole["band"], f"{few} of this GPU, release and machine: left-out families of {said}; ranking carries over, levels do not"


def class_level(gpu: str) -> Level:
    """What a measured run tells of all others on such a GPU."""
    found = _class(gpu, fits())
    return Level(found["shared"], found["band"])


def _class(gpu: str, learned: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = learned["classes"].get(class_of(gpu)) or learned["classes"]["all"]
    return found


@cache
def _spec() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(resources.files("planner.recipes").joinpath("studies.json").read_text("utf-8"))
    return found
