"""Any bytes either parse or give findings: no traceback, no hang, whatever they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ppdsl.diagnostics import Severity, SpecError, render_plain
from ppdsl.spec.keywords import ITEM_WORDS, MEASURES, OPTIONS, OTHER_WORDS, SETTINGS
from ppdsl.spec.load import check_spec, check_text, load_spec
from ppdsl.spec.parse import MAX_FINDINGS, parse
from ppdsl.spec.scan import MAX_BYTES
from tests.spec.catalogue import INVALID, VALID

SIGNS = '{ } [ ] ( ) , : . = @ + - * ** // % -> .. ..< <= == != / " # \n \t \\ ; ~'.split(" ")
OTHERS = [
    "a",
    "h",
    "0",
    "1",
    "99999999999999999999",
    "1.5",
    "12%",
    "80GiB",
    "1f1b",
    "0F0",
    "F[",
    "0F[",
    '"x"',
    "/a.*/",
    "é",
    "\0",
]
WORDS = [*ITEM_WORDS, *OTHER_WORDS, *SETTINGS, *MEASURES, *OPTIONS, *SIGNS, *OTHERS]
TEXTS = [path.read_text(encoding="utf-8") for path in VALID]
FUZZ = settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])


def everything(data: str | bytes) -> None:
    """Whatever can be asked of a text: it answers, or says what is wrong."""
    checked = check_text(data)
    assert (checked.partition is None) == any(one.severity is Severity.ERROR for one in checked.diagnostics)
    assert len(checked.diagnostics) <= MAX_FINDINGS + 1
    assert render_plain(checked.diagnostics) or checked.partition is not None


@given(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join))
@FUZZ
def test_a_soup_of_words_gives_findings(text: str) -> None:
    everything(text)


@given(st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join))
@FUZZ
def test_a_soup_of_words_between_the_braces_gives_findings(text: str) -> None:
    everything(f"param n = 2\npipeline net {{\nstage a {{ x }}\n{text}\n}}")


@given(st.data())
@FUZZ
def test_a_valid_spec_with_a_few_letters_changed_gives_findings(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        text = text[:start] + data.draw(st.sampled_from(["", *WORDS])) + text[end:]
    everything(text)


@given(st.binary(max_size=200) | st.text(max_size=200))
@example(b"\xff")
@example("\ud800")
@example("stage\x0c\x0b\u2028a")
@FUZZ
def test_any_bytes_give_findings(data: bytes | str) -> None:
    everything(data)


LONG = {
    "parentheses": "(", "braces": "{", "brackets": "[", "closing braces": "}", "names": "a.", "comment": "#",
    "comments": "#\n", "digits": "7", "letters": "a", "quotes": '"', "slashes": "/", "stars": "*", "minus": "-",
    "sums": "1+", "powers": "2**", "lines": "\n", "spaces": " ", "nulls": "\0", "stages": "stage a{b}\n",
    "stage": "stage ",
    "open regex": "/a\\", "commas": "a,", "differences": "a-", "pipelines": "pipeline a{", "percent": "1 % ",
    "text": "é",
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("around", ["", "pipeline net {\nstage a @ ", "pipeline net {\nstage a { ", "let x = "])
def test_a_mebibyte_of_anything_is_answered(name: str, around: str) -> None:
    piece = LONG[name]
    text = around + piece * ((MAX_BYTES - 100) // len(piece.encode()))
    parsed = parse(text)
    if name not in {"comment", "comments", "lines", "spaces"} or around:
        assert parsed.diagnostics
    assert len(render_plain(parsed.diagnostics)) < 200_000


@pytest.mark.parametrize("count", [61, 500, 9000])
@pytest.mark.parametrize("piece", ["-", "1 + ", "2 ** ", "1 * (2) + "])
def test_a_long_expression_is_refused_before_it_is_too_deep(piece: str, count: int) -> None:
    messages = {
        found.code for found in check_text(f"pipeline net {{ stage a @ {piece * count}1 {{ x }} }}").diagnostics
    }
    assert messages & {"nested-too-deep", "spec-too-long"}


def test_a_file_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "long.ppspec"
    file.write_bytes(b"#" * (MAX_BYTES + 5))
    with pytest.raises(SpecError, match=r"spec-too-long.*The file has 1048577 bytes, but a spec has at most 1048576"):
        load_spec(file)


def test_a_large_spec_is_read_whole() -> None:
    stages = "\n".join(f"    stage b{i} @ {i % 4} {{ h[{i}], g[{i}] }}" for i in range(2000))
    checked = check_text(f"pipeline net {{\n{stages}\n}}")
    assert checked.diagnostics == ()
    assert checked.partition is not None
    assert len(checked.partition.stages) == 2000


def test_marks_of_byte_order_returns_and_tabs_are_fine() -> None:
    text = "\ufeffpipeline net {\r\n\tstage a @ 9 { x }\r\n\tranks = 2\r\n}\r\n"
    (found,) = check_text(text.encode()).diagnostics
    assert str(found.labels[0].span) == "<spec>:2:10"
    assert found.message == "Stage `a` is on rank 9, but there are 2 ranks."


def test_a_null_byte_is_shown_where_it_stands() -> None:
    (found,) = check_text("pipeline net {\n    stage a { x\0 }\n}").diagnostics
    assert (found.code, str(found.labels[0].span)) == ("syntax", "<spec>:2:16")


def test_utf16_is_named() -> None:
    (found,) = check_text("pipeline net { }".encode("utf-16")).diagnostics
    assert found.message == "The file is UTF-16, but a spec is UTF-8."


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_every_wrong_spec_is_told_as_json_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    for found in check_spec(path.name).diagnostics:
        assert found.to_json().startswith("{")


# ---------------------------------------------------------------- files


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.ppspec").write_text(text, encoding="utf-8")
    return folder / "main.ppspec"


def codes_of(path: Path) -> list[str]:
    return [found.code for found in check_spec(path).diagnostics]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.ppspec").write_text("param n = 1")
    inside = tmp_path / "specs"
    inside.mkdir()
    (inside / "link.ppspec").symlink_to(tmp_path / "secret.ppspec")
    (inside / "folder").symlink_to(tmp_path)
    main = write(inside, main='include "link.ppspec" include "folder/secret.ppspec" pipeline net { stage a { x } }')
    assert codes_of(main) == ["outside-folder", "outside-folder"]


def test_links_that_go_round_are_missing_files(tmp_path: Path) -> None:
    (tmp_path / "a.ppspec").symlink_to(tmp_path / "b.ppspec")
    (tmp_path / "b.ppspec").symlink_to(tmp_path / "a.ppspec")
    assert codes_of(write(tmp_path, main='include "a.ppspec" pipeline net { stage a { x } }')) == ["missing-file"]


@pytest.mark.parametrize("name", ["", ".", "a" * 5000, "\0", "../main.ppspec", "~/x", "/dev/zero", "//etc/passwd"])
def test_names_that_are_no_file_inside(tmp_path: Path, name: str) -> None:
    (code,) = codes_of(write(tmp_path, main=f'include "{name}"\npipeline net {{ stage a {{ x }} }}'))
    assert code in {"missing-file", "outside-folder", "word-too-long"}


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.ppspec")
    assert codes_of(write(tmp_path, main='include "pipe.ppspec" pipeline net { stage a { x } }')) == ["missing-file"]


def test_the_command_answers_at_once_and_loads_no_torch(tmp_path: Path) -> None:
    main = write(tmp_path, main="pipeline net { stage a { x } }")
    source = (
        "import sys; from ppdsl.cli import main; "
        f"code = main(['check', {str(main)!r}]); print(code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 False False", done.stderr
