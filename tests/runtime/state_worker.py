"""What the processes of the tests of clipping, filling and checkpoints run: `state_worker.py FOLDER SCENARIO ...`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import ppdsl as pp
from ppdsl.runtime.checkpoints import safetensors_io, saving
from tests.runtime import test_ties
from tests.runtime.models import CASES, batch_of, pipeline_of, plain_step
from tests.runtime.saying import keep_others_apart, say
from tests.runtime.test_checkpoint import Deep, adamw, deep, train
from tests.runtime.test_clipping import Lopsided
from tests.runtime.test_loss import batch as batch_of_tags
from tests.runtime.test_loss import cross_entropy, tagger
from tests.runtime.test_materialize import everything, on_meta
from tests.runtime.worker import attempt

FOLDER = Path(sys.argv[1])


def piped(model: Any, **options: Any) -> pp.Pipeline:
    x, y = torch.zeros(4, 4).double(), torch.zeros(4, 4).double()
    return pp.pipeline(
        model, (x,), targets=y, loss=functional.mse_loss, microbatches=2, timeout=20.0, **options
    )  # fmt: skip


def still(model: Any) -> Any:
    model.drop.p = 0.0
    return model


def clipping() -> None:
    """The norm and the gradients are those of the whole model, on every rank."""
    for name in ("chain", "tied", "frozen", "norm", "strided", "reentered"):
        case = CASES[name]
        inputs, targets = batch_of(case)
        model, twin, whole = case.model(), case.model(), case.model()
        placement = {key: i % 2 for i, key in enumerate(case.keys)}
        pipe = pipeline_of(case, model, placement=placement, timeout=20.0)
        virtual = pipeline_of(case, twin, placement=placement, runtime="inprocess")
        for norm_type in (2.0, 1.0, float("inf")):
            pipe.step(*inputs, targets=targets)
            virtual.step(*inputs, targets=targets)
            plain_step(case, whole)
            norm, expected = pipe.clip_grad_norm_(0.01, norm_type), virtual.clip_grad_norm_(0.01, norm_type)
            assert torch.equal(norm, expected), f"{name}: {norm} and {expected}"
            torch.testing.assert_close(norm, clip_grad_norm_(whole.parameters(), 0.01, norm_type), rtol=1e-12, atol=0.0)
        for key, parameter in pipe.named_parameters():
            other = twin.get_parameter(key)
            assert parameter.grad is other.grad is None or torch.equal(parameter.grad, other.grad), f"{name}: {key}"
        pipe.close()
    torch.manual_seed(3)
    model = Lopsided()
    x, y = torch.randint(5, (8,)), torch.randint(3, (8,))
    # Rank 1 owns nothing that is trained.
    pipe = pp.pipeline(
        model, (x[:2],), targets=y[:2], loss=functional.cross_entropy, microbatches=4, timeout=20.0,
        placement={0: 0, 1: 1, 2: 1, 3: 0},
    )  # fmt: skip
    pipe.step(x, targets=y)
    norm = pipe.clip_grad_norm_(1e9)
    pp.save(pipe, FOLDER / "lopsided")
    # Rank 1 has no parameters at all, so no optimizer either.
    idle = pp.pipeline(
        model, (x[:2],), targets=y[:2], loss=functional.cross_entropy, microbatches=4, timeout=20.0,
        placement={0: 0, 1: 1, 2: 0, 3: 0},
    )  # fmt: skip
    optimizer = torch.optim.SGD(idle.parameters(), lr=0.1, momentum=0.9) if dist.get_rank() == 0 else None
    assert (optimizer is None) == (not list(idle.parameters()))
    idle.step(x, targets=y)
    idle.clip_grad_norm_(1.0)
    pp.save(idle, FOLDER / "lopsided", optimizer)
    assert pp.load(idle, FOLDER / "lopsided", optimizer).optimizer == "SGD"
    say(f"equal, {norm.item() > 0}, {sum(p.requires_grad for p in pipe.parameters())}")


def clipping_errors() -> None:
    """One rank's error is every rank's, and the next step is fine."""
    case = CASES["chain"]
    rank = dist.get_rank()
    model = case.model()
    inputs, targets = batch_of(case)
    pipe = pipeline_of(case, model, placement={0: 0, 1: 1, 2: 0}, timeout=20.0)
    pipe.step(*inputs, targets=targets)
    attempt(lambda: pipe.clip_grad_norm_(1.0 + rank))
    if rank == 1:
        model.b.bias.grad[0] = float("nan")
    attempt(lambda: pipe.clip_grad_norm_(1.0, error_if_nonfinite=True))
    if rank == 1:
        model.b.weight.grad = torch.zeros(4, 4).double().to_sparse()
    attempt(lambda: pipe.clip_grad_norm_(1.0))
    model.b.weight.grad = None
    say(pipe.step(*inputs, targets=targets).loss.isfinite().item())


def token_mean() -> None:
    x, y = batch_of_tags()
    model, whole = tagger(), tagger()
    pipe = pp.pipeline(
        model, (x[:1],), targets=y[:1], loss=cross_entropy, microbatches=4, reduction="token_mean", timeout=20.0,
        placement={0: 0, 1: 1, 2: 0},
    )  # fmt: skip
    expected = cross_entropy(whole(x), y)
    expected.backward()
    torch.testing.assert_close(pipe.step(x, targets=y).loss, expected.detach(), rtol=1e-10, atol=0.0)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-10, atol=1e-14)
    say("equal")


def ties() -> None:
    """Tied parameters train like one parameter, also those that start apart or are frozen at first."""
    for kind in (test_ties.Language, test_ties.Nested):
        for placement in ({0: 0, 1: 1, 2: 0, 3: 1}, {0: 0, 1: 1, 2: 1, 3: 0}):
            model, whole = test_ties.made(kind), test_ties.made(kind)
            pipe = test_ties.piped(model, placement=placement, timeout=20.0)
            test_ties.trained(pipe, whole, 3)
            pipe.close()
    model, whole = test_ties.made(test_ties.Language), test_ties.made(test_ties.Language)
    pipe = test_ties.piped(model, placement={0: 0, 1: 1, 2: 0, 3: 1}, timeout=20.0)
    for target in (model, whole):
        target.table.weight.requires_grad_(False)
    test_ties.trained(pipe, whole, 4, thaw=2)
    # Each rank has initialised its own copy, with another seed: the owner's is what counts.
    model = test_ties.made(test_ties.Language)
    pipe = test_ties.piped(model, placement={0: 0, 1: 1, 2: 0, 3: 1}, timeout=20.0)
    torch.manual_seed(dist.get_rank())
    model.table.reset_parameters()
    torch.manual_seed(0)
    whole = test_ties.made(test_ties.Language)
    torch.manual_seed(0)
    whole.table.reset_parameters()
    test_ties.trained(pipe, whole, 3)
    say("equal")


def filling() -> None:
    """Each rank fills its own part only, with one device's values, and reads no more than that."""
    got: list[str] = []
    inner = safetensors_io.SafetensorsSource.read

    def counted(self: Any, targets: Any) -> None:
        got.extend(targets)
        inner(self, targets)

    safetensors_io.SafetensorsSource.read = counted
    x, y = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)

    def made(model: Any) -> pp.Pipeline:
        return pp.pipeline(
            model, (x,), targets=y, loss=cross_entropy, microbatches=2, timeout=20.0,
            placement={0: 0, 1: 1, 2: 1, 3: 0},
        )  # fmt: skip

    plain = on_meta()
    pp.materialize(plain, seed=21)
    values = everything(plain)
    for weights in (None, FOLDER / "parts", FOLDER / "whole.safetensors"):
        model = on_meta()
        pipe = made(model)
        pp.materialize(pipe, weights, seed=21)
        mine = {name for name, _ in pipe.named_parameters()}
        for name, value in everything(model).items():
            if name in mine:
                assert torch.equal(value, values[name]), name
            assert value.is_meta or torch.equal(value, values[name]), name
        foreign = "attention.in_proj_weight" if dist.get_rank() == 0 else "table.weight"
        assert everything(model)[foreign].is_meta
        pipe.step(x.repeat(2, 1), targets=y.repeat(2, 1))
        if weights is None:
            pp.export_safetensors(pipe_of_values(made, values), FOLDER / "parts")
            pp.export_safetensors(pipe_of_values(made, values), FOLDER / "whole.safetensors")
        else:
            say(f"{len(got)} read, {'table.weight' in got}, {'attention.in_proj_weight' in got}")
        got.clear()
    wrong = FOLDER / ("whole.safetensors" if dist.get_rank() == 0 else "nothing.safetensors")
    attempt(lambda: pp.materialize(made(on_meta()), wrong))


def pipe_of_values(made: Any, values: dict[str, torch.Tensor]) -> pp.Pipeline:
    model = on_meta()
    pipe = made(model)
    pp.materialize(pipe, values)
    return pipe


def keeping() -> None:
    """Train, save, train on; the losses afterwards are what others have to meet."""
    pipe = piped(still(deep(stages=2)))
    optimizer = adamw(pipe)
    train(pipe, optimizer, range(3))
    pp.save(pipe, FOLDER / "kept", optimizer, extra={"from": "two ranks"})
    expected = train(pipe, optimizer, range(3, 6))
    say(repr(expected))
    # Three stages on the same two ranks, from nothing but the checkpoint.
    with torch.device("meta"):
        model = still(Deep(stages=3).double())
    again = piped(model, placement={0: 1, 1: 0, 2: 1})
    pp.load(again, FOLDER / "kept")
    other = adamw(again)
    found = pp.load(again, FOLDER / "kept", other)
    assert found.ranks == 2
    assert train(again, other, range(3, 6)) == expected
    for name, _ in pipe.named_parameters():
        held = model.get_parameter(name)
        assert held.is_meta or torch.equal(held, pipe.module.get_parameter(name)), name
    # Saved in the background while training goes on.
    handle = pp.save(pipe, FOLDER / "background", optimizer, asynchronous=True)
    train(pipe, optimizer, range(6, 7))
    say(handle.wait().name)


def troubles() -> None:
    """Whatever one rank cannot do, every rank reports, and the pipeline goes on."""
    rank = dist.get_rank()
    pipe = piped(still(deep(stages=2)))
    optimizer = adamw(pipe)
    train(pipe, optimizer, range(1))
    pp.save(pipe, FOLDER / "trouble", optimizer)
    say("# missing")
    attempt(lambda: pp.load(pipe, FOLDER / ("nowhere" if rank == 1 else "trouble")))
    say("# one optimizer")
    attempt(lambda: pp.save(pipe, FOLDER / "trouble", optimizer if rank == 1 else None))
    say("# another model")
    attempt(lambda: pp.load(piped(still(deep(stages=2, blocks=7))), FOLDER / "trouble"))
    say("# disk full")
    inner = saving.Part.write

    def full(self: saving.Part) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        inner(self)

    saving.Part.write = full
    attempt(lambda: pp.save(pipe, FOLDER / "trouble"))
    say("# disk full in the background")
    handle = pp.save(pipe, FOLDER / "trouble", asynchronous=True)
    attempt(handle.wait)
    saving.Part.write = inner
    say("# afterwards")
    say(pp.load(pipe, FOLDER / "trouble", optimizer).steps)
    train(pipe, optimizer, range(1, 2))
    dist.barrier()
    say(pp.save(pipe, FOLDER / "trouble", optimizer).wait().name)


def killed() -> None:
    """Rank 1 dies while it writes the second checkpoint; the other one says so within the time-out."""
    rank = dist.get_rank()
    pipe = pp.pipeline(
        still(deep(stages=2)), (torch.zeros(4, 4).double(),), targets=torch.zeros(4, 4).double(),
        loss=functional.mse_loss, microbatches=2, timeout=6.0,
    )  # fmt: skip
    optimizer = adamw(pipe)
    train(pipe, optimizer, range(3))
    pp.save(pipe, FOLDER / "killed", optimizer)
    train(pipe, optimizer, range(3, 4))
    if rank == 1:
        saving.Part.write = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(30.0, os._exit, (1,)).start()
    started = time.monotonic()
    attempt(lambda: pp.save(pipe, FOLDER / "killed", optimizer))
    assert time.monotonic() - started < 25
    os._exit(0)


if __name__ == "__main__":
    keep_others_apart()
    dist.init_process_group("gloo")
    for scenario in sys.argv[2:]:
        say(f"# {scenario}")
        attempt(globals()[scenario])
    dist.barrier()
    dist.destroy_process_group()
