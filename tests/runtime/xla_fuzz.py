"""Random models, placements, schedules and transports on XLA devices against the plain model on the CPU.

`python -m tests.runtime.xla_fuzz --minutes 30 --seed 1` starts one process after the other, each with a few rounds, and
says what went wrong, with the seed of the round, and what processes held. `round_of(seed)` is one round.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ppdsl as pp
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.schedule import families
from ppdsl.schedule.arrangement import Arrangement
from tests.runtime.every_family import SCHEDULES
from tests.runtime.xla_fuzz_model import Net, loss_of

__all__ = ["Held", "Round", "held", "round_of", "wrong_in"]

STEPS = 3
ROUNDS_OF_A_PROCESS = 12
REPEATS = 6
"""Times that a process runs its first round again at its end: what grows then is a leak."""
ROUND_SECONDS = 180


@dataclass(frozen=True)
class Round:
    """What a seed stands for.

    Attributes:
        model: Random.
        options: Of the pipeline.
        batch: Of one step.
        rows: Of one micro-batch of the example.
        optimizer: Makes an optimizer.
        clip: What gradients are clipped to, or None.
        drops: Whether masks are drawn: then the reference runs on one XLA device, which draws the same ones.
    """

    model: Net
    options: dict[str, Any]
    batch: torch.Tensor
    rows: int
    optimizer: Callable[[Any], torch.optim.Optimizer]
    clip: float | None
    drops: bool

    @property
    def text(self) -> str:
        """Return what it is, in a line."""
        kind = "float64" if self.batch.dtype == torch.float64 else "float32"
        return f"{self.options} {kind} rows={len(self.batch)} drops={self.drops} {self.model.text}"


def round_of(seed: int) -> Round:
    """Return the round of a seed: the same one on every machine."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    double = chance.random() < 0.6
    drops = chance.random() < 0.25
    model = Net(chance, exact=double, dropout=0.4 if drops else 0.0)
    model = model.double() if double else model
    microbatches, rows = chance.randint(1, 6), chance.randint(2, 4)
    schedule = chance.choice(SCHEDULES)
    keys = sorted(set(model.keys))
    options: dict[str, Any] = {
        "schedule": schedule,
        "microbatches": microbatches,
        "transport": chance.choice(["permute", "permute", "host"]),
        "recompute": chance.choice([None, None, True, chance.sample(keys, chance.randint(1, len(keys)))]),
        "seed": seed,
    }
    if families()[schedule.partition("(")[0]].arrangement is Arrangement.GIVEN:
        options["placement"] = {key: chance.randrange(4) for key in keys}
    # One row less than full micro-batches: the last one is smaller. A batch norm needs two rows.
    short = microbatches > 1 and chance.random() < 0.2 and not (model.normed and rows == 2)
    batch = torch.randn(rows * microbatches - short, model.width, dtype=torch.float64 if double else torch.float32)
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, lr=0.05),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    ]
    if double and not model.normed:
        # They divide by the size of a gradient, and make much of the rounding in one that should be zero.
        makers += [lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3), lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3)]
    return Round(model, options, batch, rows, chance.choice(makers), chance.choice([None, None, 0.5]), drops)


def _pipeline(one: Round, model: nn.Module, **options: Any) -> pp.Pipeline:
    options = {**one.options, **options, "loss": loss_of, "targets": (), "devices": "xla"}
    return pp.pipeline(model, (one.batch[: one.rows],), **options)


def _built(one: Round, model: nn.Module) -> pp.Pipeline:
    """Return the pipeline; a family that does not fit the model is replaced by one that fits all."""
    try:
        return _pipeline(one, model)
    except pp.ScheduleError:
        keys = sorted(set(one.model.keys))
        one.options.update(schedule="gpipe", placement={key: number % 4 for number, key in enumerate(keys)})
        return _pipeline(one, model)


class _Plain:
    """The plain loop over micro-batches on the CPU, or on one XLA device where masks are drawn."""

    def __init__(self, one: Round) -> None:
        self._one = one
        self.model: Any = copy.deepcopy(one.model)
        self._pipe = None
        if one.drops:
            keys = dict.fromkeys(one.model.keys, 0)
            alone = {"schedule": "sequential", "placement": keys, "transport": "host", "recompute": None}
            self._pipe = _pipeline(one, self.model, **alone)

    def step(self) -> torch.Tensor:
        if self._pipe is not None:
            loss = self._pipe.step(self._one.batch).loss
            assert loss is not None
            return loss
        count = self._one.options["microbatches"]
        parts = self._one.batch.tensor_split(min(count, len(self._one.batch)))
        total = sum(loss_of(self.model(part)) * (len(part) / len(self._one.batch)) for part in parts)
        assert isinstance(total, torch.Tensor)
        total.backward()  # type: ignore[no-untyped-call]
        return total.detach()

    def clip(self, most: float) -> None:
        if self._pipe is not None:
            self._pipe.clip_grad_norm_(most)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), most)


def wrong_in(one: Round) -> list[str]:
    """Run a round and return what is not as in the plain model; nothing at best."""
    xla_adapter.device_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PpdslWarning)
        reference = _Plain(one)
        pipe = _built(one, one.model)
        pairs = [(m, one.optimizer(m.parameters())) for m in (one.model, reference.model)]
        wrong: list[str] = []
        for number in range(STEPS):
            before = xla_adapter.compilations()
            loss = pipe.step(one.batch).loss
            assert loss is not None
            if one.clip:
                pipe.clip_grad_norm_(one.clip)
            compiled = xla_adapter.compilations() - before
            wrong += _apart(one, f"loss of step {number}", loss, expected := reference.step(), _size(expected), number)
            if one.clip:
                reference.clip(one.clip)
            wrong += _differences(one, number, reference.model)
            before = xla_adapter.compilations()
            pairs[0][1].step()
            compiled += xla_adapter.compilations() - before
            if number >= 2 and compiled:
                wrong.append(f"{compiled} programs compiled in step {number}")
            pairs[1][1].step()
            for _, optimizer in pairs:
                optimizer.zero_grad()
        wrong += _differences(one, STEPS, reference.model)
        pipe.close()
    return wrong


def _differences(one: Round, number: int, plain: nn.Module) -> Iterator[str]:
    theirs = dict(plain.named_parameters())
    given = [p.grad for p in theirs.values() if p.grad is not None]
    most = max((_size(gradient) for gradient in given), default=0.0)
    for name, parameter in one.model.named_parameters():
        yield from _apart(one, f"{name} in step {number}", parameter, theirs[name], _size(theirs[name]), number)
        ours, other = parameter.grad, theirs[name].grad
        if ours is None or other is None:
            # A gradient that autograd leaves out crosses an edge as zeros.
            found = ours if other is None else other
            if found is not None and bool(found.cpu().any()):
                yield f"gradient of {name} in step {number} is there on one side only"
            continue
        yield from _apart(one, f"gradient of {name} in step {number}", ours, other, most, number)
    buffers = dict(plain.named_buffers())
    for name, buffer in one.model.named_buffers():
        if buffer.is_floating_point():
            yield from _apart(one, f"{name} in step {number}", buffer, buffers[name], _size(buffers[name]), number)
        elif not torch.equal(buffer.cpu(), buffers[name].cpu()):
            yield f"{name} in step {number} is {buffer.cpu()} instead of {buffers[name].cpu()}"


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max())


def _apart(one: Round, name: str, ours: torch.Tensor, theirs: torch.Tensor, scale: float, steps: int) -> list[str]:
    apart = float((ours.detach().cpu().double() - theirs.detach().cpu().double()).abs().max())
    # In float32 each step of the optimizer adds what the one before was off by.
    tolerance = 1e-7 if one.batch.dtype == torch.float64 else 1e-5 * (1 + 2 * steps)
    return [] if apart <= tolerance * max(scale, 1e-2) else [f"{name} is off by {apart:.2g} of {scale:.2g}"]


# ---------------------------------------------------------------- what a process holds


@dataclass(frozen=True)
class Held:
    """What this process holds.

    Attributes:
        tensors: XLA tensors that are alive.
        threads: Of Python.
        files: Open ones.
        megabytes: Resident memory.
    """

    tensors: int
    threads: int
    files: int
    megabytes: float


def held() -> Held:
    """Return what this process holds, after a collection."""
    from torch_xla.debug import metrics

    gc.collect()
    made, gone = (int(metrics.counter_value(name) or 0) for name in ("CreateXlaTensor", "DestroyXlaTensor"))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are not needed
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Held(made - gone, threading.active_count(), files, round(megabytes, 1))


# ---------------------------------------------------------------- many rounds


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _rounds(first: int, count: int) -> None:
    """Run rounds in this process, and the first one again; a line for each."""
    for seed in [*range(first, first + count), *[first] * REPEATS]:
        _say(begun=seed)
        # It writes where every thread stands, and ends the process: a hang names its seed.
        faulthandler.dump_traceback_later(ROUND_SECONDS, exit=True)
        one = round_of(seed)
        try:
            wrong = wrong_in(one)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        faulthandler.cancel_dump_traceback_later()
        said = {"wrong": wrong, "text": one.text if wrong else "", "schedule": one.options["schedule"]}
        said |= {"transport": one.options["transport"]}
        del one
        _say(seed=seed, held=vars(held()), **said)


@dataclass
class _Found:
    rounds: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)
    growth: list[float] = field(default_factory=list)


def _one_process(first: int, count: int, found: _Found) -> None:
    command = [sys.executable, "-m", "tests.runtime.xla_fuzz", "--rounds", str(count), "--seed", str(first)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=ROUND_SECONDS * (count + REPEATS)
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = [line for line in lines if "seed" in line]
    for line in results:
        found.rounds += 1
        found.kinds.update([line["schedule"], line["transport"]])
        if line["wrong"]:
            found.wrong.append(f"seed {line['seed']}: {'; '.join(line['wrong'][:4])}\n    {line['text']}")
    if done.returncode or len(results) < count + REPEATS:
        last = next((line["begun"] for line in reversed(lines) if "begun" in line), first)
        found.wrong.append(f"seed {last}: the process ended with {done.returncode}: {done.stderr[-3000:]}")
        return
    again = [line["held"] for line in results[count:]]
    for name in ("tensors", "threads", "files"):
        if again[-1][name] > again[1][name]:
            found.leaks.append(f"seed {first}: {name} {[line[name] for line in again]}")
    found.growth.append(round(again[-1]["megabytes"] - again[1]["megabytes"], 1))


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="begin no process after so many minutes")
    parser.add_argument("--rounds", type=int, help="run so many rounds in this process, and say a line for each")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each next one has the next number")
    given = parser.parse_args()
    if given.rounds:
        _rounds(given.seed, given.rounds)
        return 0
    found, seed = _Found(), given.seed
    ends = time.monotonic() + 60 * (given.minutes or 1)
    while time.monotonic() < ends:
        said = len(found.wrong)
        _one_process(seed, ROUNDS_OF_A_PROCESS, found)
        seed += ROUNDS_OF_A_PROCESS
        for text in found.wrong[said:]:
            sys.stdout.write(f"{text}\n")
        sys.stdout.write(f"{found.rounds} rounds, {len(found.wrong)} wrong, growth {found.growth[-1:]} MiB\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(found.kinds)}\nleaks: {found.leaks}\nMiB of {REPEATS - 2} repeats: {found.growth}\n")
    return 1 if found.wrong or found.leaks else 0


if __name__ == "__main__":
    raise SystemExit(_main())
