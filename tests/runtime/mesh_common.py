"""What the scenarios of replicas have in common."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

import ppdsl as pp
from tests.runtime.mesh_models import (
    ROWS,
    TIGHT,
    assert_trained_alike,
    batch,
    cross_entropy,
    share,
)
from tests.runtime.saying import say

HALVES = {0: 0, 1: 0, 2: 1, 3: 1}


def folder() -> Path:
    """Return where the test keeps its files."""
    return Path(sys.argv[1])


def attempt(run: Callable[[], object]) -> None:
    """Say what `run` gives, when it is not None, or its error."""
    try:
        result = run()
        if result is not None:
            say(result)
    except Exception as error:
        say(f"{type(error).__name__}: {error}")


def meshes() -> dict[str, object]:
    """Return meshes of two replicas of two ranks, laid out in every way."""
    return {
        "rows": {"dp": 2, "pp": 2},
        "columns": {"pp": 2, "dp": 2},
        "anyhow": DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "pp")),
    }


def place(mesh: object) -> tuple[int, int]:
    """Return this process's rank in its pipeline, and the number of its pipeline."""
    me = dist.get_rank()
    if isinstance(mesh, DeviceMesh):
        replica, rank = (mesh.mesh == me).nonzero()[0].tolist()
        return rank, replica
    return (me % 2, me // 2) if next(iter(mesh)) == "dp" else (me // 2, me % 2)


def adamw(target: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(target.parameters(), lr=0.05, weight_decay=0.1)


def train_on(
    pipe: pp.Pipeline, optimizer: torch.optim.Optimizer, steps: range, folder: Path, replica: int, replicas: int
) -> None:
    for step in steps:
        optimizer.zero_grad()
        tokens, words = share(batch(step, 4 * ROWS), replica, replicas)
        pipe.step(tokens, targets=words)
        pipe.clip_grad_norm_(0.1)
        optimizer.step()
    pp.save(pipe, folder, optimizer)


def train_beside(
    pipe: pp.Pipeline,
    whole: torch.nn.Module,
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
    rows: int,
    replica: int,
    what: str,
) -> Counter[str]:
    """Train two replicas and the plain model on the whole batch for three steps, compare all of it, and evaluate.

    Returns:
        What torch's groups did in the second step.
    """
    counts: Counter[str] = Counter()
    for step in range(3):
        tokens, words = batch(step, rows)
        mine = share((tokens, words), replica, 2)
        with Heard() as heard:
            result = pipe.step(mine[0], targets=mine[1], outputs="all")
        counts = heard.counts if step == 1 else counts
        logits = whole(tokens)
        loss = cross_entropy(logits, words)
        loss.backward()
        torch.testing.assert_close(result.loss, loss.detach(), **TIGHT)
        torch.testing.assert_close(result.outputs, logits.detach().chunk(2)[replica], **TIGHT)
        norm = clip_grad_norm_(whole.parameters(), 0.1)
        torch.testing.assert_close(pipe.clip_grad_norm_(0.1), norm, **TIGHT)
        assert_trained_alike(pipe, whole, f"{what}, step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_trained_alike(pipe, whole, what)
    expected = cross_entropy(whole(tokens), words).detach()
    torch.testing.assert_close(pipe.evaluate(mine[0], targets=mine[1]).loss, expected, **TIGHT)
    return counts


def train_whole(whole: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        tokens, words = batch(step, 4 * ROWS)
        cross_entropy(whole(tokens), words).backward()
        clip_grad_norm_(whole.parameters(), 0.1)
        optimizer.step()


class Heard(TorchDispatchMode):
    """Counts what torch's groups do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function.namespace == "c10d":
            self.counts[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))
