"""Each finding of `resolve`, whole.

`python -m tests.spec.test_resolve_messages` writes `golden_resolve.txt` anew.
"""

from __future__ import annotations

import ast
import linecache
from pathlib import Path

import pytest

from ppdsl.diagnostics import Diagnostic, SpecError, render_plain
from ppdsl.spec.resolve import resolve
from tests.spec.reading import FILE, read, whole
from tests.spec.resolve_cases import CASES, Case

GOLDEN = Path(__file__).parent / "golden_resolve.txt"
SOURCES = Path(__file__).parents[2] / "ppdsl" / "spec"
MODULES = "assigning claims coverage cuts elements fitting memory order owners paths placing resolve select split tying"
RULE = "=" * 80


def findings_of(case: Case) -> tuple[Diagnostic, ...]:
    try:
        return resolve(read(case.body), case.outline).warnings
    except SpecError as error:
        return error.diagnostics


def written(case: Case) -> str:
    """The spec, numbered by the excerpts, and all findings."""
    text = whole(case.body)
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    try:
        return f"{case.code} ({case.model})\n{text}\n{render_plain(findings_of(case))}\n"
    finally:
        del linecache.cache[FILE]


@pytest.mark.parametrize("at", range(len(CASES)), ids=[f"{at}-{case.code}" for at, case in enumerate(CASES)])
def test_each_message_is_as_agreed(at: int) -> None:
    golden = GOLDEN.read_text(encoding="utf-8").split(f"{RULE}\n")
    assert len(golden) == len(CASES)
    assert written(CASES[at]) == golden[at]


@pytest.mark.parametrize("case", CASES, ids=[f"{at}-{case.code}" for at, case in enumerate(CASES)])
def test_each_case_shows_its_code(case: Case) -> None:
    assert case.code in {finding.code for finding in findings_of(case)}


def test_each_code_of_the_resolver_has_a_failing_example() -> None:
    codes = {
        node.args[0].value
        for module in MODULES.split()
        for node in ast.walk(ast.parse((SOURCES / f"{module}.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Diagnostic"
        and isinstance(node.args[0], ast.Constant)
    }
    assert codes == {case.code for case in CASES}


if __name__ == "__main__":
    GOLDEN.write_text(f"{RULE}\n".join(written(case) for case in CASES), encoding="utf-8")
