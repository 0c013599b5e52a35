"""What happens in a round: drawn from its name, so that it can be done again."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from ppdsl.schedule.arrangement import Arrangement
from ppdsl.schedule.registry import families
from tests.runtime.every_family import SCHEDULES
from tests.runtime.shapes import SHAPES
from tests.soak.nets import random_entry, shape_entry
from tests.trust.entry import Entry, keys_of
from tests.trust.test_entries import ENTRIES

__all__ = ["Fault", "Round", "draw"]

GIVEN = tuple(name for name in SCHEDULES if families()[name.partition("(")[0]].arrangement is Arrangement.GIVEN)
OWN = tuple(name for name in SCHEDULES if name not in GIVEN)


@dataclass(frozen=True)
class Fault:
    """One rank gets into trouble.

    Attributes:
        what: `raise`, `kill` or `stop`.
        rank: Which one.
        event: At which of its sends and waits.
    """

    what: str
    rank: int
    event: int


@dataclass(frozen=True)
class Round:
    """One pipeline and its steps.

    Attributes:
        name: `seed/ranks/session/number`.
        entry: The model.
        microbatches: In a step.
        steps: How many.
        options: The pipeline's other arguments.
        fault: What happens, or nothing.
        seed: Of the delays.
    """

    name: str
    entry: Entry
    microbatches: int
    steps: int
    options: dict[str, Any]
    fault: Fault | None
    seed: int

    @property
    def text(self) -> str:
        """What it is, in a line."""
        placement = self.options.get("placement")
        where = "" if placement is None else f" on {list(placement.values())}"
        what = "" if self.fault is None else f", {self.fault.what} on rank {self.fault.rank} at {self.fault.event}"
        return f"{self.entry.name}, {self.options['schedule']}{where}, {self.microbatches} micro-batches{what}"


def draw(name: str, faults: Collection[str], often: float) -> Round:
    """Return the round of a name.

    Args:
        name: `seed/ranks/session/number`.
        faults: Which kinds may happen.
        often: The part of rounds in which one does.
    """
    chance = random.Random(name)
    ranks = int(name.split("/")[1])
    kind = chance.choices(("random", "shape", "trap"), (4, 3, 3))[0]
    microbatches = chance.randint(1, 6)
    if kind == "shape":
        entry = shape_entry(chance.choice(list(SHAPES)), 2 * ranks)
        schedule = chance.choice(SCHEDULES)
        keys: list[int | str] = list(range(2 * ranks))
    elif kind == "trap":
        entry = chance.choice([entry for entry in ENTRIES if len(_keys(entry)) >= ranks])
        schedule, keys = chance.choice(GIVEN), _keys(entry)
    else:
        stages = ranks + chance.randint(0, 3)
        entry, schedule, keys = random_entry(chance, stages), chance.choice(GIVEN), list(range(stages))
    options: dict[str, Any] = {"schedule": schedule}
    if schedule in GIVEN:
        # Every rank has a stage.
        where = [*range(ranks), *(chance.randrange(ranks) for _ in keys[ranks:])]
        chance.shuffle(where)
        options["placement"] = dict(zip(keys, where, strict=True))
    if chance.random() < 0.2:
        options["recompute"] = True
    fault = None
    if faults and chance.random() < often:
        fault = Fault(chance.choice(sorted(faults)), chance.randrange(ranks), chance.randint(1, 3 * microbatches))
    return Round(name, entry, microbatches, chance.randint(1, 3), options, fault, chance.getrandbits(30))


@cache
def _keys_by_name() -> dict[str, Callable[[], list[int | str]]]:
    return {entry.name: cache(lambda entry=entry: keys_of(entry, 2)) for entry in ENTRIES}


def _keys(entry: Entry) -> list[int | str]:
    return list(_keys_by_name()[entry.name]())
