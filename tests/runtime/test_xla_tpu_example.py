"""`examples/tpu_llama.py` and the guide on XLA devices of the CPU: what is printed, and equality with plain loops."""

from __future__ import annotations

import contextlib
import doctest
import io
import runpy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.docs.run_page import main as run_page

pytestmark = pytest.mark.xla
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ppdsl[models]'")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tpu_llama.py"
SMALL = "--layers 4 --width 16 --rows 1 --length 8 --steps 3 --microbatches 4"


@cache
def ran(arguments: str = "") -> tuple[str, tuple[float, ...], SimpleNamespace]:
    """Return what the example printed, its losses and its names."""
    names = runpy.run_path(str(EXAMPLE))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses = names["main"](arguments.split())
    return printed.getvalue(), tuple(losses), SimpleNamespace(**names)


def plain_losses(names: SimpleNamespace, options: Any) -> list[float]:
    """Train the unmarked model on the CPU in a plain loop over the same micro-batches."""
    model = names.llama(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for tokens in names.batches(options, options.steps):
        parts = tokens.chunk(options.microbatches)
        loss = torch.stack([names.next_byte(model(input_ids=part), part) for part in parts]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_prints_what_stands_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`...` stands for times, and for the drawing of them."""
    monkeypatch.setenv("COLUMNS", "100")
    shown = EXAMPLE.with_suffix(".out").read_text(encoding="utf-8")
    text, losses, _ = ran()
    checker = doctest.OutputChecker()
    example = doctest.Example("", shown)
    flags = doctest.ELLIPSIS
    assert checker.check_output(shown, text, flags), checker.output_difference(example, text, flags)
    assert losses[-1] < losses[0]


def test_it_trains_like_the_plain_loop() -> None:
    _, losses, names = ran()
    assert list(losses) == pytest.approx(plain_losses(names, names.read_options([])), rel=1e-5, abs=0)


def test_in_bfloat16_it_learns_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("to be or not to be, " * 40)
    arguments = f"{SMALL} --layers 5 --stages 5 --schedule gpipe --transport host --bf16 --text {text}"
    said, losses, names = ran(f"{arguments} --save {tmp_path / 'saved'}")
    assert "5 stages on 4 ranks, gpipe" in said
    assert "transport  host. It was asked for." in said
    assert (tmp_path / "saved" / "latest").read_text().strip() == "step-3"
    assert list(losses) == pytest.approx(plain_losses(names, names.read_options(arguments.split())), rel=1e-2, abs=0)


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(SystemExit, match="4 stages, but there are 4 devices to fill and 3 layers to divide"):
        ran("--layers 3")


def test_the_examples_of_the_guide_run_on_devices(tmp_path: Path) -> None:
    """Also those that tests/docs leaves out, as it has no torch_xla."""
    page = tmp_path / "tpu.md"
    text = (ROOT / "docs" / "guides" / "tpu.md").read_text(encoding="utf-8")
    assert "<!-- not run: needs torch_xla -->" in text
    page.write_text(text.replace("<!-- not run: needs torch_xla -->", ""), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = run_page(page)
    assert status == 0, printed.getvalue()
    assert "\n0 programs compiled\n" in f"\n{printed.getvalue()}"
