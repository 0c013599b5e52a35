"""GPT-2 trains for 200 steps like the plain loop, whatever the schedule, the ranks and the runtime.

`python -m tests.runtime.gpt2_curves` runs all of them for 200 steps; here each does a part of it.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from tests.runtime.gpt2_curves import (
    EVERY,
    RANKS,
    SHOWN,
    STAGES_PER_RANK,
    STEPS,
    apart,
    corpus,
    curve,
    curves_of_processes,
    plain_curve,
)

pytestmark = pytest.mark.current

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "train-gpt2.md"

WHOLE = {("1f1b", 2), ("zbv", 4), ("interleaved", 1)}
"""Schedule and ranks of the curves that are compared to their ends."""


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return plain_curve()


@pytest.mark.parametrize(("schedule", "ranks"), [*product(STAGES_PER_RANK, RANKS)])
def test_the_loss_of_every_step_is_the_plain_loops(schedule: str, ranks: int, plain: list[float]) -> None:
    steps = STEPS if (schedule, ranks) in WHOLE else 10
    assert apart(curve(schedule, ranks, steps), plain[:steps]) < 1e-8


def test_it_learns_something(plain: list[float]) -> None:
    assert sum(plain[-10:]) / 10 < 0.7 * plain[0]


def test_the_guide_shows_the_first_steps_as_they_are() -> None:
    """The rest of its table is what `python -m tests.runtime.gpt2_curves float32` printed."""
    text = GUIDE.read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    assert [name.split(", ") for name in rows[0][2:]] == [[name, f"{ranks} ranks"] for name, ranks in SHOWN]
    assert [int(row[0]) for row in rows[1:]] == [1, *range(EVERY, STEPS + 1, EVERY)]
    # Another Python has another text.
    same = f"({len(corpus())} bytes)" in text
    curves = [plain_curve(EVERY, torch.float32), *(curve(*shown, EVERY, torch.float32) for shown in SHOWN)]
    for row in rows[1:3]:
        actual = [losses[int(row[0]) - 1] for losses in curves]
        assert [float(cell) for cell in row[1:]] == pytest.approx(actual, abs=1e-3 if same else 0.5)


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "longest", "most"), [(2, "zbv", STEPS), (4, "interleaved", 40)])
def test_several_processes_have_it_too(ranks: int, longest: str, most: int, plain: list[float]) -> None:
    """Every rank gets every loss as a number (UR-027, UR-147, UR-148)."""
    steps = {schedule: most if schedule == longest else 10 for schedule in STAGES_PER_RANK}
    for schedule, losses in curves_of_processes(ranks, steps).items():
        assert apart(losses, plain[: steps[schedule]]) < 1e-8
