"""The mistakes that people make first: each text whole, exit code 1, on standard error, and nothing is started.

`GOLDEN=write` writes `mistakes.txt` anew; read the difference before you keep it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ppdsl as pp
from ppdsl.cli import main
from tests.spec_models.commands import twelve

MODEL = f"{Path(__file__).with_name('commands.py')}:twelve"
GOLDEN = Path(__file__).with_name("mistakes.txt")
RULE = "=" * 80
WRITE = os.environ.get("GOLDEN") == "write"
SPEC = """\
pipeline gpt {
    schedule     = 1f1b
    microbatches = 8
    ranks        = 4

    stage embed @ 0 { transformer.wte, transformer.h[0:4] }
    stage middle @ 1 { transformer.h[4:8] }
    stage late @ 2 { transformer.h[8:12] }
    stage head @ 3 { transformer.ln_f, lm_head }

    expect imbalance <= 2
}
"""
MISTAKES = {
    "a layer is dropped": ("transformer.h[8:12]", "transformer.h[9:12]"),
    "a layer is claimed twice": ("transformer.h[4:8]", "transformer.h[4:9]"),
    "an element that is not there": ("transformer.ln_f", "transformer.h[12], transformer.ln_f"),
    "a misspelled setting": ("microbatches", "microbatchs "),
    "a rank that is not there": ("head @ 3", "head @ 9"),
    "a broken contract": ("imbalance <= 2", "imbalance <= 1.01"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(name: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    Path("gpt.ppspec").write_text(SPEC.replace(*MISTAKES[name]))
    code = main(["check", "gpt.ppspec", "--model", MODEL])
    heard = capfd.readouterr()
    return code, heard.out, heard.err


def golden() -> dict[str, str]:
    sections = (section.partition("\n") for section in GOLDEN.read_text().split(f"{RULE}\n") if section)
    return {name: text for name, _, text in sections}


def test_without_a_mistake_all_is_well(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("gpt.ppspec").write_text(SPEC)
    assert main(["check", "gpt.ppspec", "--model", MODEL]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_whole_and_ends_with_1(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(name, capfd)
    assert code == 1
    texts = golden()
    if WRITE:
        texts[name] = err
        GOLDEN.write_text("".join(f"{RULE}\n{one}\n{texts[one]}" for one in MISTAKES if one in texts))
    assert err == texts[name]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_pipeline_says_the_same_before_anything_runs(
    name: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, _, err = said(name, capfd)
    model, args = twelve()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(pp.SpecError) as refused:
        pp.pipeline(model, args, spec="gpt.ppspec", loss=lambda output: output.square().mean())
    assert str(refused.value).strip() == err.strip()
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())
