"""`headrace ui`: the page answers over HTTP on this machine, stops when told to, and refuses what cannot be served."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ir.errors import InputError
from ui import launch

ROOT = Path(launch.__file__).parent.parent
PATIENCE_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(port: int, folder: Path) -> Iterator[subprocess.Popen]:
    """The command as a user types it, in another folder than the clone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    command = [sys.executable, "-m", "headrace", "ui", "--headless", "--port", str(port)]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def fetch(url: str, process: subprocess.Popen) -> str:
    """What the page answers, once it does; fails with the process's words when it has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return reply.read().decode()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    process.kill()
    pytest.fail(f"{url} does not answer: {process.communicate()[1]}")


def test_the_page_answers_and_ends_when_told_to(tmp_path):
    port = free_port()
    with serving(port, tmp_path) as process:
        assert fetch(f"http://127.0.0.1:{port}/_stcore/health", process) == "ok"
        assert "<title>" in fetch(f"http://127.0.0.1:{port}/", process)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert said == "", "standard output is for documents"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=rf"--port {taken.getsockname()[1]} cannot be used: Address already in use; try --port"):
            launch.serve(taken.getsockname()[1], headless=True)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(InputError, match="ports go from 1 to 65535"):
        launch.serve(port, headless=True)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == "streamlit" else object())
    with pytest.raises(InputError, match=r"the page needs streamlit, which is not installed here: pip install 'headrace\[ui\]'"):
        launch.serve(8501, headless=True)


def test_the_page_tells_nobody_and_listens_on_this_machine_only():
    flags = launch.command(8601, headless=True)
    assert {"--browser.gatherUsageStats=false", "--server.address=127.0.0.1", "--server.port=8601", "--server.headless=true"} <= set(flags)
    assert "--server.headless=false" in launch.command(8601, headless=False)
