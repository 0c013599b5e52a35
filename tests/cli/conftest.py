"""Plain output, and a folder with models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import MODELS


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of models, in a working directory of its own."""
    (tmp_path / "nets.py").write_text(MODELS)
    (tmp_path / "helper.py").write_text("WIDTH = 8\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "nets.py"
