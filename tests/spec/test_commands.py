"""`ppdsl check` and `ppdsl fmt`: what they write where, and their exit codes."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppdsl.cli import main

GOOD = """param ranks = 2

pipeline net {
    ranks        = ranks
    microbatches = 2 * ranks
    stage a @ 0 { encoder }
    stage b @ ranks - 1 { decoder }
}
"""
UGLY = "param ranks=2 # two\npipeline net{stage a@0{encoder,}}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.ppspec").write_text(GOOD)
    (tmp_path / "ugly.ppspec").write_text(UGLY)
    (tmp_path / "bad.ppspec").write_text("pipeline net { stge a { x } }\n")
    return tmp_path


def typed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


@pytest.mark.usefixtures("folder")
class TestCheck:
    def test_a_spec_without_findings_is_fine(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "good.ppspec"]) == 0
        out, err = capsys.readouterr()
        assert (
            out
            == "good.ppspec: fine by itself (2 stages, 2 ranks, 4 micro-batches); --model holds it against a model\n"
        )
        assert err == ""

    def test_findings_go_to_the_standard_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "bad.ppspec", "good.ppspec"]) == 1
        out, err = capsys.readouterr()
        assert out.startswith("good.ppspec: fine")
        assert err == (
            "error[syntax]: Nothing begins with `stge`.\n"
            " --> bad.ppspec:1:16\n"
            "  |\n"
            "1 | pipeline net { stge a { x } }\n"
            "  |                ^^^^\n"
            "help: did you mean `stage`?\n"
        )

    def test_parameters_are_set(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "good.ppspec", "-D", "ranks=8", "--format", "json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts == {
            "file": "good.ppspec", "pipeline": "net", "stages": ["a", "b"], "ranks": 8, "microbatches": 16,
            "parameters": {"ranks": 8},
        }  # fmt: skip

    def test_findings_as_json_are_one_object_a_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "bad.ppspec", "--format", "json"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert json.loads(line)["code"] == "syntax"

    @pytest.mark.parametrize("given", ["ranks", "ranks=", "ranks=x", "ranks=1.5", "=3", "ranks=9999999999999999999999"])
    def test_a_parameter_that_is_no_number_is_wrong_use(self, given: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "good.ppspec", "-D", given]) == 2
        assert capsys.readouterr().err == (
            f"error[wrong-parameter]: `-D {given}` gives no whole number to a parameter.\n"
            "help: write it as in -D ranks=8\n"
        )

    def test_a_parameter_given_twice_is_wrong_use(self) -> None:
        assert main(["check", "good.ppspec", "-D", "ranks=1", "-D", "ranks=2"]) == 2

    def test_a_file_that_is_not_there_is_wrong_use(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "none.ppspec"]) == 2
        assert (
            "error[unreadable-spec]: none.ppspec cannot be read: no such file or directory." in capsys.readouterr().err
        )

    def test_a_warning_is_shown_and_fine(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "ugly.ppspec"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("ugly.ppspec: fine by itself (1 stage, 1 warning)")
        assert err.startswith("warning[unused-name]: Parameter `ranks` is never used.")

    def test_the_standard_input_is_checked(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        typed(monkeypatch, b"pipeline net {\n  stage a { \xff }\n}")
        assert main(["check", "-"]) == 1
        assert capsys.readouterr().err.startswith("error[not-utf8]: Byte 0xff is no UTF-8 text.\n --> <stdin>:2:13")


class TestFormat:
    def test_a_file_is_written_in_canonical_form(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "ugly.ppspec").chmod(0o640)
        assert main(["fmt", "ugly.ppspec", "good.ppspec"]) == 0
        assert capsys.readouterr().out == "formatted ugly.ppspec\n"
        expected = "param ranks = 2  # two\npipeline net {\n    stage a @ 0 { encoder }\n}\n"
        assert (folder / "ugly.ppspec").read_text() == expected
        assert (folder / "ugly.ppspec").stat().st_mode & 0o777 == 0o640
        assert (folder / "good.ppspec").read_text() == GOOD
        assert sorted(path.name for path in folder.iterdir()) == ["bad.ppspec", "good.ppspec", "ugly.ppspec"]

    def test_a_link_stays_a_link(self, folder: Path) -> None:
        (folder / "link.ppspec").symlink_to("ugly.ppspec")
        assert main(["fmt", "link.ppspec"]) == 0
        assert (folder / "link.ppspec").is_symlink()
        assert "stage a @ 0" in (folder / "ugly.ppspec").read_text()

    def test_check_changes_nothing(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fmt", "--check", "ugly.ppspec", "good.ppspec"]) == 1
        assert capsys.readouterr().err == (
            "error[not-formatted]: ugly.ppspec is not in canonical form.\nhelp: run `ppdsl fmt ugly.ppspec`\n"
        )
        assert (folder / "ugly.ppspec").read_text() == UGLY
        assert main(["fmt", "--check", "good.ppspec"]) == 0

    def test_a_file_that_cannot_be_parsed_is_left_alone(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = (folder / "bad.ppspec").read_bytes()
        assert main(["fmt", "bad.ppspec"]) == 1
        assert "Nothing begins with `stge`" in capsys.readouterr().err
        assert (folder / "bad.ppspec").read_bytes() == before

    def test_the_standard_input_goes_to_the_standard_output(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        typed(monkeypatch, UGLY.encode())
        assert main(["fmt", "-"]) == 0
        assert capsys.readouterr().out == "param ranks = 2  # two\npipeline net {\n    stage a @ 0 { encoder }\n}\n"

    def test_line_ends_become_plain_ones(self, folder: Path) -> None:
        (folder / "crlf.ppspec").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
        assert main(["fmt", "--check", "crlf.ppspec"]) == 1
        assert main(["fmt", "crlf.ppspec"]) == 0
        assert (folder / "crlf.ppspec").read_bytes() == GOOD.encode()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_that_cannot_be_written_to_is_a_finding(self, folder: Path) -> None:
        folder.chmod(0o500)
        try:
            assert main(["fmt", "ugly.ppspec"]) == 2
        finally:
            folder.chmod(0o700)


def test_an_excerpt_of_a_spec_is_coloured_and_says_the_same(folder: Path) -> None:
    from ppdsl.diagnostics import render_plain
    from ppdsl.report.diagnostics import render_diagnostics
    from ppdsl.spec.load import check_spec

    found = check_spec("bad.ppspec").diagnostics
    text = render_diagnostics(found)
    assert text.plain == render_plain(found)
    (line,) = [line for line in text.split("\n") if line.plain.startswith("1 | ")]
    styled = {line.plain[span.start : span.end]: str(span.style) for span in line.spans}
    assert styled["pipeline"] == "magenta"
    assert styled["net"] == "bold"
