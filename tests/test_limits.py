"""Every report of other tools' users is a test, or stands in docs/limits.md with its reason."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "limits.md"
REPORTS = TESTS / "data" / "reports.txt"


def named_in_tests() -> set[str]:
    """Return the ids that tests name, those in between included (`UR-015 to UR-017`)."""
    found: set[str] = set()
    for file in TESTS.rglob("*.py"):
        for first, last in re.findall(r"\bUR-(\d{3})(?: to UR-(\d{3}))?", file.read_text(encoding="utf-8")):
            found |= {f"UR-{number:03}" for number in range(int(first), int(last or first) + 1)}
    return found


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| UR-")]


def test_every_report_is_a_test_or_a_limit() -> None:
    reports = REPORTS.read_text(encoding="utf-8").split()
    assert reports == sorted(set(reports))
    missing = set(reports) - named_in_tests() - {row[0] for row in rows()}
    assert not missing, f"neither in tests nor in docs/limits.md: {sorted(missing)}"


def test_limits_are_reports_with_a_thread_a_reason_and_what_one_gets() -> None:
    reports = REPORTS.read_text(encoding="utf-8").split()
    assert [row[0] for row in rows()] == sorted({row[0] for row in rows()} & set(reports))
    for row in rows():
        assert len(row) == 4, row
        assert re.fullmatch(r"[\w.-]+/[\w.-]+( PR)?#\d+", row[1]), row
        assert all(len(cell.split()) >= 3 for cell in row[2:]), row
