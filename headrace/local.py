"""`local`: what this machine can do, measured once and kept in a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from executor.measure import measure
from headrace.documents import check_writable, read_json, write_json
from ir.cluster import Cluster
from ir.errors import ClusterError, ExecutionError, InputError


def local_path() -> Path:
    """Where `local` is kept: $HEADRACE_LOCAL, else headrace/local.json under $XDG_CACHE_HOME, else under ~/.cache."""
    given = os.environ.get("HEADRACE_LOCAL")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "headrace" / "local.json"


def local_cluster(say: Callable[[str], None]) -> Cluster:
    """The kept cluster; measured and kept first when there is none. Raises InputError when it is damaged or cannot be kept."""
    path = local_path()
    if not path.exists():
        say(f"`local` is not measured yet: measuring this machine, kept in {path}")
        try:
            return measure_local(path, say)
        except ExecutionError as error:
            say(f"{error}. Going on with what can be had; `headrace measure` measures again")
            return measure_local(path, say, patient=True)
    try:
        return Cluster.from_json(read_json(path))
    except (ClusterError, InputError) as error:
        raise InputError(f"`local` is kept in {path}, which is damaged: {error}. `headrace measure` measures it again") from error


def measure_local(path: Path, say: Callable[[str], None], patient: bool = False) -> Cluster:
    """Measures this machine and writes the cluster to `path`. Raises ExecutionError when the machine is too busy to be measured, unless `patient`."""
    if path == local_path():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`{path.parent}` cannot be made: {error.strerror}; HEADRACE_LOCAL=FILE says where else to keep `local`") from error
    check_writable(path)
    cluster = measure(progress=lambda what: say(f"measuring {what}"), patient=patient)
    write_json(path, cluster.to_json())
    return cluster
