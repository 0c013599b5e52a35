"""What the processes of a distributed test run: `worker.py SCENARIO [ARGUMENT]`."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import ppdsl as pp
from ppdsl.runtime.processes.distributed import DistributedWorld
from tests.runtime.delays import slow_transport
from tests.runtime.every_family import run_all
from tests.runtime.models import CASES, Base, batch_of, pipeline_of
from tests.runtime.saying import keep_others_apart, say


def attempt(run: Callable[[], object]) -> None:
    """Say what `run` gives, when it is not None, or its error."""
    try:
        result = run()
        if result is not None:
            say(result)
    except BaseException as error:
        say(f"{type(error).__name__}: {error}")


def equal() -> None:
    """Every case on these processes equals the in-process run of the same placement, bit for bit."""
    ranks = dist.get_world_size()
    for case in CASES.values():
        placement = {key: i % ranks for i, key in enumerate(case.keys)}
        inputs, targets = batch_of(case)
        model, twin = case.model(), case.model()
        pipe = pipeline_of(case, model, placement=placement, timeout=30.0)
        virtual = pipeline_of(case, twin, placement=placement, runtime="inprocess")
        for _ in range(2):
            result = pipe.step(*inputs, targets=targets or None, outputs="all")
            expected = virtual.step(*inputs, targets=targets or None, outputs="all")
            assert torch.equal(result.loss, expected.loss), case.name
            assert result.losses == expected.losses, case.name
            for one, two in zip(pytree.tree_leaves(result.outputs), pytree.tree_leaves(expected.outputs), strict=True):
                assert one is two is None or torch.equal(one, two), case.name
        for name, parameter in pipe.named_parameters():
            other = twin.get_parameter(name)
            same = parameter.grad is other.grad is None or torch.equal(parameter.grad, other.grad)
            assert same, f"{case.name}: {name}"
        for name in pipe.state_dict():
            assert torch.equal(model.state_dict()[name], twin.state_dict()[name]), f"{case.name}: {name}"
        whole = pipe.full_state_dict()
        assert list(whole) == list(twin.state_dict()), case.name
        for name, value in twin.state_dict().items():
            assert torch.equal(whole[name], value), f"{case.name}: {name}"
        if case.loss is not None:
            for one, two in zip(pytree.tree_leaves(pipe(*inputs)), pytree.tree_leaves(virtual(*inputs)), strict=True):
                assert one is two is None or torch.equal(one, two), case.name
            assert torch.equal(
                pipe.evaluate(*inputs, targets=targets).loss, virtual.evaluate(*inputs, targets=targets).loss
            )
        pipe.close()
    say("equal")


def tied() -> None:
    """Copies of a tied parameter start equal, stay equal, and train as the plain model does."""
    case = CASES["tied"]
    model, twin = case.model(), case.model()
    inputs, targets = batch_of(case)
    with torch.no_grad():
        model.w.mul_(1.0 + 0.1 * dist.get_rank())
    pipe = pipeline_of(case, model, placement={0: 0, 1: 1, 2: 0}, timeout=30.0)
    virtual = pipeline_of(case, twin, placement={0: 0, 1: 1, 2: 0}, runtime="inprocess")
    one = torch.optim.AdamW(pipe.parameters(), lr=0.05, weight_decay=0.1)
    two = torch.optim.AdamW(virtual.parameters(), lr=0.05, weight_decay=0.1)
    for _ in range(5):
        pipe.step(*inputs, targets=targets)
        virtual.step(*inputs, targets=targets)
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.w, twin.w)
    copies = [torch.empty_like(model.w) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, model.w.detach())
    assert all(torch.equal(copies[0], copy) for copy in copies)
    say(", ".join(name for name, _ in pipe.named_parameters()))


def timeline() -> None:
    """Measured times of all ranks, on every rank; parallel branches run at the same time."""
    case = CASES["branches"]
    inputs, targets = batch_of(case)
    pipe = pipeline_of(case, Slow().double(), timeout=30.0)
    pipe.step(*inputs, targets=targets)
    measured = pipe.step(*inputs, targets=targets, timeline=True).timeline
    times = {str(event.action): event for event in measured.events}
    together = sum(
        min(times[f"1F{m}"].end, times[f"2F{m}"].end) > max(times[f"1F{m}"].start, times[f"2F{m}"].start)
        for m in range(4)
    )
    say(f"{len(measured.events)} events, {measured.ranks} ranks, {measured.stage_labels}, together: {together >= 2}")


class Slow(Base):
    """Branches that take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.wait = nn.Linear(4, 4), Wait()

    def forward(self, x):
        with pp.stage("stem"):
            h = torch.tanh(self.a(x))
        with pp.stage("left"):
            one = self.wait(self.b(h))
        with pp.stage("right"):
            two = self.wait(self.c(h))
        with pp.stage("join"):
            return self.d(one * two + h)


class Wait(nn.Module):
    def forward(self, x):
        if is_real(x):
            time.sleep(0.05)
        return x


def is_real(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor


class Trouble(nn.Module):
    """Does something bad in the forward of micro-batch 2."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.armed = kind, 0, False

    def forward(self, x):
        if self.armed and is_real(x):
            self.calls += 1
            if self.calls == 3:
                self.strike()
        return x * 2

    def strike(self) -> None:
        match self.kind:
            case "raise":
                raise ValueError("bad luck")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(5)
            case "hang":
                time.sleep(10)


class Troubled(Base):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.trouble = Trouble(kind)

    def forward(self, x):
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            k = self.trouble(self.b(h))
        with pp.stage(2):
            return self.c(k + h)


def trouble(kind: str) -> None:
    """Rank 1 gets into trouble; the others say what they saw, within the time-out."""
    case = CASES["chain"]
    inputs, targets = batch_of(case)
    model = Troubled(kind).double()
    pipe = pipeline_of(case, model, schedule="gpipe", timeout=5.0, placement=place(3))
    model.trouble.armed = True
    started = time.monotonic()
    attempt(lambda: pipe.step(*inputs, targets=targets))
    if kind == "raise":
        attempt(lambda: pipe.step(*inputs, targets=targets))
    assert time.monotonic() - started < 15
    # Without the clean-up that would wait for the rank in trouble; rank 0 holds the store, so it goes last.
    time.sleep(1.0 if dist.get_rank() == 0 else 0.0)
    os._exit(0)


def place(stages: int) -> dict[int | str, int]:
    return {key: key % dist.get_world_size() for key in range(stages)}


def crowded() -> None:
    """Three stage keys on two ranks."""
    case = CASES["chain"]
    attempt(lambda: pipeline_of(case, case.model(), timeout=20.0))


def different_models() -> None:
    case = CASES["chain"]
    model = case.model()
    if dist.get_rank() == 1:
        model.b = nn.Sequential(model.b, nn.Dropout(0.5))
    attempt(lambda: pipeline_of(case, model, timeout=20.0, placement=place(3)))


def different_marks() -> None:
    case = CASES["chain"]
    attempt(lambda: pipeline_of(case, case.model(), timeout=20.0, placement=place(3)))
    other = CASES["fan_out"] if dist.get_rank() == 1 else case
    attempt(lambda: pipeline_of(other, other.model(), timeout=20.0, placement=place(3)))


def refusals() -> None:
    """One rank makes another call than the others; all refuse, and the next step is fine."""
    case = CASES["chain"]
    inputs, targets = batch_of(case)
    rank = dist.get_rank()
    pipe = pipeline_of(case, case.model(), timeout=20.0, placement=place(3), dynamic=False)
    first = pipe.step(*inputs, targets=targets).loss
    attempt(lambda: pipe.step(inputs[0][:6] if rank == 1 else inputs[0], targets=targets))
    attempt(lambda: pipe.evaluate(*inputs, targets=targets) if rank == 1 else pipe.step(*inputs, targets=targets))
    attempt(lambda: pipe.step(*inputs, targets=targets, outputs="all" if rank == 1 else "none"))
    for parameter in pipe.parameters():
        parameter.grad = None
    say(torch.equal(pipe.step(*inputs, targets=targets).loss, first))


def leaving() -> None:
    """Rank 1 makes one step less than the others."""
    case = CASES["chain"]
    inputs, targets = batch_of(case)
    pipe = pipeline_of(case, case.model(), timeout=20.0, placement=place(3))
    pipe.step(*inputs, targets=targets)
    if dist.get_rank() != 1:
        attempt(lambda: pipe.step(*inputs, targets=targets))
        say("over")


def odd_loss() -> None:
    """Every rank reports a loss that is not a number."""
    case = CASES["chain"]
    inputs, targets = batch_of(case)
    pipe = pipeline_of(case, case.model(), timeout=20.0, placement=place(3))
    inputs[0][4] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = pipe.step(*inputs, targets=targets).loss
    say(loss.isnan().item())
    say("\n".join(str(warning.message) for warning in caught))


def outputs() -> None:
    """`last` gives the output to one rank, `all` to every rank, `none` to nobody."""
    case = CASES["dict_output"]
    inputs, targets = batch_of(case)
    pipe = pipeline_of(case, case.model(), timeout=20.0, placement=place(3))
    for request in ("none", "last", "all"):
        result = pipe.step(*inputs, targets=targets, outputs=request).outputs
        say("nothing" if result is None else {key: type(value).__name__ for key, value in result.items()})


def traffic() -> None:
    """The user's own messages, before and after a step, do not meet the pipeline's."""
    case = CASES["fan_out"]
    inputs, targets = batch_of(case)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pipe = pipeline_of(case, case.model(), timeout=20.0, placement=place(3))
    theirs = torch.empty(3)
    work = dist.irecv(theirs, (rank - 1) % ranks)
    loss = pipe.step(*inputs, targets=targets).loss
    dist.send(torch.full((3,), float(rank)), (rank + 1) % ranks)
    work.wait()
    say(theirs.tolist())
    say(torch.equal(pipe.step(*inputs, targets=targets).loss, loss))


def every_schedule() -> None:
    """Every schedule on every shape, with messages that take their time, equals the plain loop."""
    ranks = dist.get_world_size()
    DistributedWorld.transport = slow_transport
    say("\n".join(run_all(2 * ranks, ranks, 2 * ranks, timeout=30.0)) or "equal")


if __name__ == "__main__":
    keep_others_apart()
    dist.init_process_group("gloo")
    scenario = sys.argv[1]
    if scenario in ("trouble", "leaving"):
        globals()[scenario](*sys.argv[2:])
    else:
        for name in sys.argv[1:]:
            say(f"# {name}")
            attempt(globals()[name])
        dist.barrier()
    dist.destroy_process_group()
