"""Meshes that do not fit, what cannot be composed, and replicas that fail."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ppdsl as pp
from tests.runtime.mesh_common import HALVES, attempt, place
from tests.runtime.mesh_models import (
    ROWS,
    Talk,
    batch,
    made,
    piped,
)
from tests.runtime.saying import say


def wrong_meshes() -> None:
    me = dist.get_rank()
    for mesh in (
        {"dp": 2, "pp": 3},
        {"dp": 0},
        {"dp": 2, "cp": 2},
        DeviceMesh("cpu", [[0, 1], [2, 3]]),
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("pp", "ep")),
        {"dp": 2, "pp": 2} if me else {"dp": 4, "pp": 1},
        {"dp": 2, "pp": 2} if me else {"dp": 3},
    ):
        attempt(lambda mesh=mesh: piped(made(), 2, placement=HALVES, mesh=mesh))
    attempt(lambda: piped(made(), 2, placement={0: 0, 1: 1, 2: 2, 3: 3}, mesh={"dp": 2}))
    attempt(lambda: piped(made(), 2, mesh={"dp": 2, "pp": 2}, runtime="inprocess"))
    pipe = piped(made(), 2, placement=HALVES, mesh={"dp": 2, "pp": 2})
    tokens, words = batch(0, 2 * ROWS)
    attempt(lambda: pipe.step(tokens, targets=words, outputs="last" if me == 3 else "none"))
    attempt(lambda: pipe.step(tokens, targets=words, reduce=me != 1))
    attempt(lambda: pipe.step(tokens[:, 1 if me == 1 else 0 :], targets=words))
    say(pipe.step(tokens, targets=words).loss.isfinite().item())


def refused() -> None:
    """What cannot be composed is refused on every rank, with the reason."""
    rows = {"dp": 2, "pp": 2}
    attempt(lambda: pp.fully_shard(piped(made(), 4)))
    attempt(lambda: pp.fully_shard(made()))
    pipe = pp.fully_shard(piped(made(), 2, placement=HALVES, mesh=rows))
    attempt(lambda: pp.fully_shard(pipe))
    attempt(lambda: pp.materialize(pipe))
    pipe = piped(made(), 2, placement=HALVES, mesh=rows)
    tokens, words = batch(0, 2 * ROWS)
    pipe.step(tokens, targets=words)
    attempt(lambda: pp.fully_shard(pipe))
    attempt(lambda: piped(torch.nn.parallel.DistributedDataParallel(made()), 2, placement=HALVES, mesh=rows))
    inner = made()
    inner.a = torch.nn.parallel.DistributedDataParallel(inner.a)
    attempt(lambda: piped(inner, 2, placement=HALVES, mesh=rows))
    attempt(lambda: piped(fully_shard(made()), 2, placement=HALVES, mesh=rows))
    attempt(lambda: torch.nn.parallel.DistributedDataParallel(pipe))
    with torch.device("meta"):
        empty = Talk()
    attempt(lambda: pp.fully_shard(piped(empty, 2, placement=HALVES, mesh=rows)))


def failing() -> None:
    """A stage of the second replica fails: all four say so, and where."""
    pipe = piped(Broken(dist.get_rank()).double(), 4, placement=HALVES, mesh={"dp": 2, "pp": 2})
    tokens, words = batch(0, 4 * ROWS)
    attempt(lambda: pipe.step(tokens, targets=words))
    attempt(lambda: pipe.step(tokens, targets=words))


class Broken(Talk):
    """Fails on process 3, in the third micro-batch's backward."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self.process, self.calls = process, 0
        if process == 3:
            self.norm.weight.register_hook(self.fail)

    def fail(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the third gradient")
        return gradient


def killed() -> None:
    """A process of the second replica dies without a word, in its second step."""
    model = made()
    pipe = piped(model, 4, placement=HALVES, mesh={"dp": 2, "pp": 2})
    tokens, words = batch(0, 4 * ROWS)
    pipe.step(tokens, targets=words)
    if dist.get_rank() == 2:
        model.a.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    attempt(lambda: pipe.step(tokens, targets=words))
    os._exit(0)


def fewer() -> None:
    """One replica has a batch less than the other: the others' next step names who is missing."""
    mesh = {"dp": 2, "pp": 2}
    _, replica = place(mesh)
    pipe = piped(made(), 2, placement=HALVES, mesh=mesh)
    tokens, words = batch(0, 2 * ROWS)
    for _ in range(2 + replica):
        attempt(lambda: pipe.step(tokens, targets=words) and None)
    pipe.close()
