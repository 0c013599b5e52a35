"""Every example prints what its `.out` file holds, in one process and in several, and trains like the plain loop."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ppdsl.cli import main

ROOT = Path(__file__).resolve().parent.parent
ALL = sorted((ROOT / "examples").glob("*.py"))
EXAMPLES = [path for path in ALL if path.stem != "tpu_llama"]  # tests/runtime/test_xla_tpu_example.py runs that one
EXPERTS = ROOT / "examples" / "03_experts.py"
MICROBATCHES = 8  # in every example

every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


@dataclass(frozen=True)
class Ran:
    """What an example printed and returned."""

    text: str
    losses: tuple[float, ...]


def needs(example: Path) -> None:
    if "transformers" in example.read_text(encoding="utf-8") and find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install 'ppdsl[models]'")


@cache
def in_one_process(example: Path) -> Ran:
    threads = torch.get_num_threads()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            losses = runpy.run_path(str(example), run_name="__main__")["losses"]
    finally:
        torch.set_num_threads(threads)
    return Ran(printed.getvalue(), tuple(losses))


def under_torchrun(command: str, example: Path, processes: int) -> list[str]:
    """Return the lines that the example and its worker print, rank by rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    worker = str(ROOT / "tests" / "examples_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *launcher, worker, command, str(example), folder],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for file in sorted(Path(folder).iterdir()) for line in file.read_text().splitlines()]


def plain_losses(example: Path) -> list[float]:
    """Train the same model without ppdsl: each step on the whole batch."""
    names = runpy.run_path(str(example))
    made = names["make"]()
    inputs = [*made["args"], *made.get("kwargs", {}).values()]
    optimizer = torch.optim.AdamW(made["model"].parameters(), lr=1e-2)
    losses = []
    for batch in names["batches"](5, len(inputs[0]) * MICROBATCHES):
        loss = loss_of_output(made, batch) if "loss" in made else own_loss(made, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_of_output(made: dict[str, Any], batch: Any) -> torch.Tensor:
    *inputs, targets = batch if isinstance(batch, tuple) else (batch, batch)
    return made["loss"](made["model"](*inputs), targets)


def own_loss(made: dict[str, Any], batch: torch.Tensor) -> torch.Tensor:
    """Return the mean over the micro-batches: Hugging Face rounds it to 32 bits, so the slices must be the same."""
    parts = batch.chunk(MICROBATCHES)
    return sum(made["model"](input_ids=part, labels=part).loss * (1 / MICROBATCHES) for part in parts)


@every_example
def test_an_example_prints_what_stands_beside_it(example: Path) -> None:
    needs(example)
    ran = in_one_process(example)
    assert ran.text == example.with_suffix(".out").read_text(encoding="utf-8")
    assert ran.losses[-1] < ran.losses[0]


@every_example
def test_an_example_trains_like_the_plain_loop(example: Path) -> None:
    needs(example)
    assert list(in_one_process(example).losses) == pytest.approx(plain_losses(example), rel=1e-10, abs=0)


@pytest.mark.parametrize("example", ALL, ids=lambda path: path.stem)
def test_an_example_can_be_drawn(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs(example)
    assert main(["graph", "--model", f"{example}:make", "--view", "table"]) == 0
    assert capsys.readouterr().out.startswith("stage  ")


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 4])
@every_example
def test_an_example_is_the_same_in_several_processes_bit_for_bit(example: Path, processes: int) -> None:
    needs(example)
    alone, lines = in_one_process(example), under_torchrun("run", example, processes)
    exact = " ".join(map(repr, alone.losses))
    said = [f"rank {rank} {exact}" for rank in range(processes)]
    assert sorted(lines) == [*said, *alone.text.splitlines()]


@pytest.mark.distributed
def test_experts_work_on_one_micro_batch_at_the_same_time() -> None:
    lines = under_torchrun("overlap", EXPERTS, 4)
    assert len(lines) == 2
    assert all(line.startswith("in order: True ") for line in lines)
    assert max(int(line.rpartition(" ")[2]) for line in lines) >= 1, lines


def test_every_example_has_its_output_beside_it() -> None:
    outputs = sorted(path.stem for path in (ROOT / "examples").glob("*.out"))
    assert [path.stem for path in ALL] == outputs
