"""The guide to TPUs says what to do about every finding of XLA devices, and about none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_troubles_has_every_code_and_no_other() -> None:
    guide = (ROOT / "docs" / "guides" / "tpu.md").read_text(encoding="utf-8")
    table = guide.partition("## Troubleshooting")[2].partition("\n## ")[0]
    told = {code for line in table.splitlines() for code in re.findall(r"`(xla-[a-z-]+)`", line.split(" | ")[0])}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "ppdsl").rglob("*.py"))
    raised = set(re.findall(r'Diagnostic\(\s*"(xla-[a-z-]+)"', sources))
    assert told == raised
