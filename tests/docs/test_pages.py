"""Every link of the documentation leads somewhere, and every example prints what it shows."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppdsl.spec.format import format_spec
from ppdsl.spec.load import check_text
from tests.docs.pages import Block, Link, anchors, blocks, console_steps, links

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
CONSOLE = [b for page in PAGES for b in blocks(page) if b.language == "console" and b.run]
PYTHON = [page for page in PAGES if any(b.language == "python" and b.run for b in blocks(page))]

# Specs that are shown for their mistakes are compared in tests/catalogue.
SPECS = [
    b for page in PAGES for b in blocks(page) if b.language == "ppspec" and page.name != "diagnostics.md" and b.run
]

pytestmark = pytest.mark.docs


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def place(block: Block) -> str:
    return f"{name(block.page)}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = [f"{name(page)}:{link.line}: {link.target}" for link in links(page) if not leads_somewhere(page, link)]
    assert not broken, "\n".join(broken)


def leads_somewhere(page: Path, link: Link) -> bool:
    if "://" in link.target or link.target.startswith("mailto:"):
        return True
    path, _, anchor = link.target.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target)


@pytest.mark.parametrize("page", PYTHON, ids=name)
def test_python_examples_run_and_print_what_they_show(page: Path, tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "tests.docs.run_page", str(page)], tmp_path, sys.path[0])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("block", SPECS, ids=place)
def test_specs_have_no_mistake_and_stand_in_canonical_form(block: Block) -> None:
    assert format_spec(block.text) == block.text
    assert [found for found in check_text(block.text).diagnostics if found.severity == "error"] == []


@pytest.mark.parametrize("block", CONSOLE, ids=place)
def test_commands_end_well_and_print_what_is_shown(block: Block, tmp_path: Path) -> None:
    for command, shown in console_steps(block.text):
        done = run(["bash", "-c", command], ROOT, commands(tmp_path))
        assert done.returncode == 0, f"{place(block)}: {command} ended with {done.returncode}\n{done.stdout}"
        assert matches(shown, done.stdout), f"{place(block)}: {command}\n--- shown\n{shown}\n--- printed\n{done.stdout}"


def commands(folder: Path) -> str:
    """Return a folder with the command `ppdsl`, as an installed package brings it."""
    script = folder / "bin" / "ppdsl"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ppdsl "$@"\n')
    script.chmod(0o755)
    return str(script.parent)


def run(command: list[str], folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([path, str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONIOENCODING": "utf-8",
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, check=False, timeout=300, text=True, encoding="utf-8",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def matches(shown: str, printed: str) -> bool:
    """Compare two outputs; ``...`` stands for anything, blanks at line ends count for nothing."""
    if not shown:
        return True
    want, got = ("".join(f"{line.rstrip()}\n" for line in text.splitlines()) for text in (shown, printed))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


def test_dots_stand_for_any_text_and_any_lines() -> None:
    assert matches("loss ...\n...\nend\n", "loss 0.25  \na\nb\nend\n")
    assert not matches("loss 1\n", "loss 2\n")


def test_a_page_is_read_as_a_forge_reads_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, `with` code!\n\nSee [one](a.md#b) and `[no](link)`.\n\n```console\n$ echo [x](y)\n[x](y)\n```\n\n"
        "<!-- not run: needs two machines -->\n```python\nboom()\n```\n\n## Same\n## Same\n"
    )
    assert links(page) == (Link(3, "a.md#b"),)
    assert anchors(page) == {"a-title-with-code", "same", "same-1"}
    first, second = blocks(page)
    assert (first.line, first.language, first.run) == (6, "console", True)
    assert (second.text, second.run) == ("boom()\n", False)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (
            "```python\nx = 1\n```\n```python\n>>> x + 1\n2\n>>> [\n...     x,\n... ]\n[1]\n```\n```python\nx\n```\n",
            0,
        ),
        ("```python\n>>> 1 + 1\n3\n```\n", 1),
        ("```python\nmissing\n```\n", 1),
        ("<!-- not run: shows a mistake -->\n```python\nmissing\n```\n", 0),
    ],
    ids=["blocks share names", "other output", "an exception", "not run"],
)
def test_the_examples_of_a_page_run_in_order(text: str, status: int, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    done = run([sys.executable, "-m", "tests.docs.run_page", str(page)], tmp_path, str(tmp_path))
    assert done.returncode == status, done.stdout


def test_a_console_block_is_commands_with_their_output() -> None:
    assert console_steps("$ echo a \\\n  b\na b\n$ true\n") == (("echo a \\\n  b", "a b\n"), ("true", ""))
    with pytest.raises(ValueError, match="begins with a command"):
        console_steps("a b\n")
