from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import ppdsl as pp
from ppdsl.report.saving import saving_bar
from tests.runtime.test_checkpoint import adamw, deep, piped, train

Told = list[tuple[int, int, str]]


def trained() -> tuple[pp.Pipeline, torch.optim.Optimizer]:
    pipe = piped(deep())
    optimizer = adamw(pipe)
    train(pipe, optimizer, range(1))
    return pipe, optimizer


def bytes_of(pipe: pp.Pipeline, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of everything that is saved: the model's state, each tensor once, and the optimizer's."""
    tensors = [value for value in pipe.module.state_dict().values() if isinstance(value, torch.Tensor)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_progress_grows_from_nothing_to_every_byte(asynchronous: bool, tmp_path: Path) -> None:
    pipe, optimizer = trained()
    told: Told = []

    def note(written: int, total: int) -> None:
        told.append((written, total, threading.current_thread().name))

    pp.save(pipe, tmp_path, optimizer, asynchronous=asynchronous, progress=note).wait()
    written = [entry[0] for entry in told]
    assert written == sorted(written)
    assert (written[0], written[-1]) == (0, bytes_of(pipe, optimizer))
    assert {total for _, total, _ in told} == {written[-1]}
    assert len(told) > 10
    assert all(name.startswith("ppdsl saves") == asynchronous for *_, name in told)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_progress_that_fails_leaves_the_last_good_checkpoint(asynchronous: bool, tmp_path: Path) -> None:
    pipe, optimizer = trained()
    pp.save(pipe, tmp_path, optimizer)
    train(pipe, optimizer, range(1, 2))

    def fail(written: int, total: int) -> None:
        if written:
            raise ValueError("the screen is broken")

    with pytest.raises(pp.RunError, match=r"could not write its part of (.|\n)*the screen is broken"):
        pp.save(pipe, tmp_path, optimizer, asynchronous=asynchronous, progress=fail).wait()
    assert pp.load(pipe, tmp_path, optimizer).path.name == "step-1"


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_bar_is_one_line_that_is_drawn_again(ascii_only: bool, tmp_path: Path, monkeypatch: Any) -> None:
    bytes_written = io.BytesIO()
    file = io.TextIOWrapper(bytes_written, encoding="ascii" if ascii_only else "utf-8", newline="")
    console = Console(file=file, force_terminal=True, no_color=True, width=80, legacy_windows=False)
    pipe, optimizer = trained()
    pp.save(pipe, tmp_path, optimizer, progress=saving_bar("step 1", console))
    file.flush()
    text = bytes_written.getvalue().decode()
    lines = text.split("\r")
    full, empty = ("#", "-") if ascii_only else ("━", "╌")
    plain = [line.replace("\x1b[2m", "").replace("\x1b[0m", "") for line in lines]
    assert plain[0].startswith(f"step 1 {empty * 32} 0 B of ")
    assert plain[-1].startswith(f"step 1 {full * 32} ")
    assert text.count("\n") == 1
    assert text.endswith("\n")


def test_nothing_is_drawn_where_there_is_no_terminal(tmp_path: Path) -> None:
    file = io.StringIO()
    pipe, _ = trained()
    pp.save(pipe, tmp_path, progress=saving_bar(console=Console(file=file)))
    assert file.getvalue() == ""


SPECS = {
    "three": """
pipeline deep {
    schedule = gpipe
    stage first { blocks[0:2] }
    stage middle { blocks[2:4] }
    stage last { rest }
}
""",
    "four": """
pipeline deep {
    schedule     = zbv
    microbatches = 2
    ranks        = 2
    stage a { blocks[0] }
    stage b { blocks[1:3] }
    stage c { blocks[3] }
    stage d { rest }
}
""",
}


def test_what_one_spec_saved_goes_on_under_another_one_and_without(tmp_path: Path) -> None:  # UR-107, UR-112
    files = {name: tmp_path / f"{name}.ppspec" for name in SPECS}
    for name, text in SPECS.items():
        files[name].write_text(text)

    def made(spec: str | None) -> tuple[pp.Pipeline, torch.optim.Optimizer]:
        model = deep()
        model.drop.p = 0.0
        pipe = piped(model, spec=files.get(spec or ""))
        return pipe, adamw(pipe)

    pipe, optimizer = made("three")
    train(pipe, optimizer, range(3))
    pp.save(pipe, tmp_path / "kept", optimizer)
    expected = train(pipe, optimizer, range(3, 6))
    for spec in ("three", "four", None):
        other, theirs = made(spec)
        found = pp.load(other, tmp_path / "kept", theirs)
        assert found.spec is not None
        assert found.spec["file"].endswith("three.ppspec")
        assert train(other, theirs, range(3, 6)) == pytest.approx(expected, rel=1e-12)
    assert [len(piped(deep(), spec=files[name]).graph.stages) for name in SPECS] == [3, 4]
