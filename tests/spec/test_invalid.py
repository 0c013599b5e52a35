"""What is said about wrong specs, whole; and that each code the front end knows has its example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ppdsl
from ppdsl.cli import main
from ppdsl.diagnostics import SpecError
from ppdsl.spec.load import check_text, load_spec, load_spec_text
from tests.spec.catalogue import INVALID, WITHOUT_FILE, findings_of

SPEC = Path(ppdsl.__file__).parent / "spec"
FRONT_END = [
    "build_terms", "check", "check_contracts", "check_order", "check_settings", "check_stages", "context", "files",
    "include", "load", "parse", "quantities", "scan", "selections", "syntax",
]  # fmt: skip
CODE = re.compile(r'(?:Diagnostic|report|unknown)\(\s*(?:[\w., ]*,\s*)?"([a-z0-9]+(?:-[a-z0-9]+)+|syntax)"')


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_a_wrong_spec_is_told_exactly_this(path: Path) -> None:
    expected = path.with_suffix(".txt").read_text(encoding="utf-8")
    assert findings_of(path) == expected
    assert f"[{path.stem}]" in expected


def codes() -> set[str]:
    found: set[str] = set()
    for name in FRONT_END:
        found |= set(CODE.findall((SPEC / f"{name}.py").read_text(encoding="utf-8")))
    return found


def test_every_code_has_a_failing_example_and_every_example_a_code() -> None:
    assert len(codes()) > 45
    assert codes() - {path.stem for path in INVALID} - set(WITHOUT_FILE) == set()
    extra = {"no-microbatches", "no-ranks"}  # handed through a variable
    assert {path.stem for path in INVALID} - codes() <= extra


def test_every_text_beside_the_examples_belongs_to_one() -> None:
    texts = {path.stem for path in INVALID[0].parent.glob("*.txt")}
    assert texts == {path.stem for path in INVALID}


def message_of(text: str | bytes, **overrides: int) -> list[str]:
    return [found.message for found in check_text(text, overrides=overrides).diagnostics]


def test_a_file_that_cannot_be_read_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="cannot be read: no such file"):
        load_spec(tmp_path / "none.ppspec")
    assert main(["check", str(tmp_path)]) == 2
    assert "cannot be read: is a directory." in capsys.readouterr().err


def test_a_text_that_is_no_file_can_name_none() -> None:
    text = 'pipeline net { schedule = csv("order.csv") stage a { x } }'
    assert message_of(text) == ["The text has no folder to look for `order.csv` in."]


def test_a_spec_includes_at_most_32_files(tmp_path: Path) -> None:
    for number in range(33):
        (tmp_path / f"{number}.ppspec").write_text("")
    lines = [f'include "{number}.ppspec"' for number in range(33)]
    (tmp_path / "main.ppspec").write_text("\n".join([*lines, "pipeline net { stage a { x } }"]))
    with pytest.raises(SpecError, match="A spec includes at most 32 files"):
        load_spec(tmp_path / "main.ppspec")


def test_a_value_from_python_must_be_a_whole_number() -> None:
    text = "param n = 1 pipeline net { stage a { h[n] } }"
    with pytest.raises(SpecError, match="Parameter `n` is set to True, which is no whole number"):
        load_spec_text(text, overrides={"n": True})
    assert load_spec_text(text, overrides={"n": 5}).parameters == (("n", 5),)
