"""The whole text of each toy's error, in `errors.txt`; `python -m tests.recording.toys.errors` writes it anew."""

from __future__ import annotations

import warnings
from pathlib import Path

from ppdsl.diagnostics import CallError
from tests.recording import harness
from tests.recording.toys import TOYS
from tests.recording.toys.base import Outcome, Toy

__all__ = ["error_of_violation", "expected_errors"]

PLACE = Path(__file__).with_suffix(".txt")


def expected_errors() -> dict[str, str]:
    """The pinned texts, by the toy's name."""
    texts: dict[str, str] = {}
    for section in PLACE.read_text().split("\n===== ")[1:]:
        name, _, text = section.partition("\n")
        texts[name] = text.strip()
    return texts


def error_of_violation(toy: Toy) -> str:
    """Record a toy and give its stages a micro-batch for which the recording does not hold."""
    recording = harness.record_call(harness.build(toy), *harness.call_of(toy, harness.SEEDS[0]))
    harness.seed(harness.SEEDS[1])
    if toy.violates is None:
        raise ValueError(toy.name)
    args, kwargs = toy.violates()
    try:
        harness.accept(recording, args, kwargs)
    except CallError as error:
        return harness.neutral(str(error))
    return "accepted"


def _write() -> None:
    lines = ["What recording each toy says, or a call that does not fit its recording; places have no lines."]
    for toy in TOYS.values():
        if toy.outcome is Outcome.REFUSED:
            lines += [f"===== {toy.name}", harness.neutral(harness.judge(toy, with_loss=False).text)]
        elif toy.violates is not None:
            lines += [f"===== {toy.name}", error_of_violation(toy)]
    PLACE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _write()
