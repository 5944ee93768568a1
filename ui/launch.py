"""Starts the page: Streamlit in a process of its own, on this machine only, telling nobody."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

from ir.errors import InputError

PAGE = Path(__file__).with_name("app.py")
DEFAULT_PORT = 8501
ADDRESS = "127.0.0.1"

FLAGS = {
    "browser.gatherUsageStats": "false", "client.toolbarMode": "minimal", "global.developmentMode": "false", "server.fileWatcherType": "none",
    "server.maxUploadSize": "20", "theme.base": "light", "theme.primaryColor": "#0072B2",
}  # fmt: skip


def serve(port: int = DEFAULT_PORT, headless: bool = False) -> int:
    """Shows the page at http://127.0.0.1:`port` until it is interrupted; returns the exit code, 130 when interrupted.

    `headless` opens no browser. Raises InputError when Streamlit or Plotly is missing, the port is no port, or somebody else listens on it.
    """
    _check_installed()
    _check_port(port)
    before = signal.signal(signal.SIGTERM, _interrupt)
    child = subprocess.Popen(command(port, headless), env=environment(), stdout=sys.stderr.fileno())
    try:
        return child.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
        signal.signal(signal.SIGTERM, before)


def command(port: int, headless: bool) -> list[str]:
    """The command line of the process that serves the page."""
    flags = {**FLAGS, "server.address": ADDRESS, "server.port": str(port), "server.headless": str(headless).lower()}
    return [sys.executable, "-m", "streamlit", "run", str(PAGE), *(f"--{name}={value}" for name, value in flags.items())]


def environment() -> dict[str, str]:
    """This process's environment, in which the packages beside `ui` can be imported from any folder."""
    paths = [str(PAGE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def _check_installed() -> None:
    missing = [name for name in ("streamlit", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"the page needs {' and '.join(missing)}, which is not installed here: pip install 'headrace[ui]'")


def _check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise InputError(f"--port {port}: ports go from 1 to 65535; the default is {DEFAULT_PORT}")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise InputError(f"--port {port} cannot be used: {error.strerror}; try --port {port + 1 if port < 65535 else DEFAULT_PORT}") from error


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
