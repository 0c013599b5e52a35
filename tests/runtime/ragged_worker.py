"""What the processes of a test of shapes run: `ragged_worker.py SCENARIO...`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import ppdsl as pp
from ppdsl.runtime.processes.distributed import DistributedWorld
from tests.runtime.delays import slow_transport
from tests.runtime.models import CASES
from tests.runtime.saying import keep_others_apart, say
from tests.runtime.test_uneven import UNET, Tokens, cross_entropy, tokens_of
from tests.runtime.uneven import apart, make, plain_uneven, rows_of
from tests.runtime.worker import attempt


def placed(keys: tuple[int | str, ...]) -> dict[int | str, int]:
    return {key: number % dist.get_world_size() for number, key in enumerate(keys)}


def ragged() -> None:
    """Batches of all sizes equal the plain loop, and the run in one process bit for bit."""
    for case, schedule in ((CASES["tied"], "1f1b"), (CASES["fan_out"], "gpipe"), (UNET, "1f1b")):
        model, twin, plain = case.model(), case.model(), case.model()
        axes = {"x": 0, "targets[0]": 0}
        options = {"placement": placed(case.keys), "schedule": schedule, "batch_axis": axes}
        pipe = make(case, model, timeout=20.0, **options)
        virtual = make(case, twin, runtime="inprocess", **options)
        for rows in (8, 7, 3, 1, 16, 7):
            inputs, targets = rows_of(case, rows)
            result = pipe.step(*inputs, targets=targets, outputs="all")
            expected = virtual.step(*inputs, targets=targets, outputs="all")
            assert torch.equal(result.loss, expected.loss), (case.name, rows)
            assert torch.equal(result.outputs, expected.outputs), (case.name, rows)
            wrong = apart(pipe, result, plain, *plain_uneven(case, plain, rows, 4))
            assert not wrong, (case.name, rows, wrong)
            if case is UNET:
                # In training its norms count an evaluation too.
                continue
            loss = pipe.evaluate(*inputs, targets=targets).loss
            assert torch.equal(loss, virtual.evaluate(*inputs, targets=targets).loss), (case.name, rows)
        pipe.close()
    say("equal")


def lengths() -> None:
    """Sequences of changing length, with messages that take their time."""
    DistributedWorld.transport, before = slow_transport, DistributedWorld.transport
    torch.manual_seed(0)
    model, plain = Tokens().double(), Tokens().double()
    plain.load_state_dict(model.state_dict())
    x, y = tokens_of(2, 5)
    pipe = pp.pipeline(
        model, (x,), targets=y, loss=cross_entropy, microbatches=4, placement=placed((0, 1, 2)), timeout=20.0,
    )  # fmt: skip
    for rows, length in ((8, 5), (8, 9), (7, 3), (2, 9), (8, 5)):
        x, y = tokens_of(rows, length)
        loss = cross_entropy(plain(x), y)
        loss.backward()
        assert torch.allclose(pipe.step(x, targets=y).loss, loss, rtol=1e-12), (rows, length)
        for name, parameter in pipe.named_parameters():
            assert torch.allclose(parameter.grad, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-12), name
    DistributedWorld.transport = before
    say("equal")


def other_shape() -> None:
    """One rank gives another shape than the others, or rows that do not fit; the next step is fine."""
    case = CASES["chain"]
    pipe = make(case, case.model(), timeout=20.0, placement=placed(case.keys))
    rank = dist.get_rank()
    inputs, targets = rows_of(case, 8)
    first = pipe.step(*inputs, targets=targets).loss

    def differ() -> None:
        x, y = rows_of(case, 7 if rank == 1 else 8)
        pipe.step(*x, targets=y)

    attempt(differ)
    attempt(lambda: pipe.step(inputs[0][: 6 if rank == 1 else 8], targets=targets))
    say(torch.equal(pipe.evaluate(*inputs, targets=targets).loss, first))


def stops_early(then: str) -> None:
    """Rank 1 has one batch less than the others; then it evaluates, closes its pipeline, sleeps or ends."""
    case = CASES["chain"]
    pipe = make(case, case.model(), timeout=4.0, placement=placed(case.keys))
    rank = dist.get_rank()
    batches = [8, 8] if rank == 1 else [8, 8, 5]
    started = time.monotonic()

    def epoch() -> None:
        for rows in batches:
            inputs, targets = rows_of(case, rows)
            pipe.step(*inputs, targets=targets)
        say("no more batches")
        if then == "evaluate" or rank != 1:
            inputs, targets = rows_of(case, 8)
            pipe.evaluate(*inputs, targets=targets)
        elif then == "close":
            pipe.close()
        elif then == "sleep":
            time.sleep(6.0)

    attempt(epoch)
    assert time.monotonic() - started < 20.0
    say("over")


if __name__ == "__main__":
    keep_others_apart()
    dist.init_process_group("gloo")
    if sys.argv[1] == "stops_early":
        for ending in sys.argv[2:]:
            say(f"# {ending}")
            stops_early(ending)
        # Rank 0 holds the store, so it goes last.
        time.sleep(1.0 if dist.get_rank() == 0 else 0.0)
    else:
        for name in sys.argv[1:]:
            say(f"# {name}")
            attempt(globals()[name])
        dist.barrier()
    dist.destroy_process_group()
