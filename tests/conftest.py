"""What tests share: a machine to stand for `local`, so that no test measures or touches the user's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

LOCAL = Path(__file__).parent / "fixtures" / "local.json"


@pytest.fixture(scope="session")
def local_document() -> Mapping[str, Any]:
    """The cluster document of a machine of two cores, as `headrace measure` wrote it."""
    document: Mapping[str, Any] = json.loads(LOCAL.read_text(encoding="utf-8"))
    return document


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Path:
    """`local` is the machine of `local_document` during the test."""
    monkeypatch.setenv("HEADRACE_LOCAL", str(LOCAL))
    return LOCAL


@pytest.fixture(autouse=True, scope="session")
def _no_user_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The user's cache is out of reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("HEADRACE_LOCAL", raising=False)
        yield patch
