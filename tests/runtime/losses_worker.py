"""What four processes of the tests of losses, metrics and scalers run: `losses_worker.py SCENARIO...`."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ppdsl as pp
from tests.runtime.saying import keep_others_apart, say
from tests.trust.graphs import mean_square
from tests.trust.losses import Balanced

WIDTH = 4
ROWS = 2
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


class Net(nn.Module):
    """Four stages: one has no parameters, two say something; a weight is tied over ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), Balanced(), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            pp.aux_loss(h.square().mean(), 0.2)
            pp.metric("mean", h.mean())
            pp.metric("rows", torch.tensor(len(h)), "sum")
        with pp.stage(1):
            h = h.tanh()
        with pp.stage(2):
            h = self.b(h)
            pp.metric("mean", h.mean())
        with pp.stage(3):
            return self.c(h) + self.a(h)


def batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, ROWS * microbatches, WIDTH, generator=chance, dtype=torch.float64)
    return x, y


def loss_over(model: nn.Module, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    """Train the plain model over the micro-batches of `x`; return the loss."""
    total = torch.zeros((), dtype=torch.float64)
    count = len(x) // ROWS
    for number in range(count):
        rows = slice(ROWS * number, ROWS * number + ROWS)
        with pp.collect_losses() as added:
            loss = mean_square(model(x[rows]), y[rows])
        loss = (loss + sum(added)) / count
        (loss * factor).backward()
        total += loss.detach()
    return total


def said() -> None:
    """The loss, its auxiliary part and the metrics are those of one process, on every rank, in training and out."""
    model, plain, twin = Net(), Net(), Net()
    x, y = batch(4)
    pipe = pp.pipeline(model, (x[:ROWS],), targets=y[:ROWS], loss=mean_square, microbatches=4, timeout=30.0)
    virtual = pp.pipeline(
        twin, (x[:ROWS],), targets=y[:ROWS], loss=mean_square, microbatches=4, runtime="inprocess"
    )  # fmt: skip
    for _ in range(2):
        total = loss_over(plain, x, y)
        for ours, theirs in (
            (pipe.step(x, targets=y), virtual.step(x, targets=y)),
            (pipe.evaluate(x, targets=y), virtual.evaluate(x, targets=y)),
        ):
            torch.testing.assert_close(ours.loss, total, **TIGHT)
            assert torch.equal(ours.loss, theirs.loss)
            assert torch.equal(ours.aux, theirs.aux)
            assert ours.losses == theirs.losses
            assert ours.metrics == theirs.metrics
            assert ours.metrics["rows"] == ROWS * 4
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, **TIGHT)
    numbers = [float(ours.loss), float(ours.aux), *map(float, ours.metrics.values())]
    everywhere: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, numbers)
    assert all(one == numbers for one in everywhere)
    pipe.close()
    say("said")


def replicas() -> None:
    """Two replicas of two ranks: the loss and the metrics are over the whole batch."""
    model, plain = Net(), Net()
    x, y = batch(8)
    mine = slice(None, 8) if dist.get_rank() < 2 else slice(8, None)
    pipe = pp.pipeline(
        model, (x[:ROWS],), targets=y[:ROWS], loss=mean_square, microbatches=4, timeout=30.0,
        placement={0: 0, 1: 0, 2: 1, 3: 1}, mesh={"dp": 2, "pp": 2},
    )  # fmt: skip
    total = loss_over(plain, x, y)
    result = pipe.step(x[mine], targets=y[mine])
    torch.testing.assert_close(result.loss, total, **TIGHT)
    assert result.metrics["rows"] == ROWS * 8
    first = plain.a(x)
    wanted = torch.stack([first, plain.b(first.tanh())]).mean().detach()
    torch.testing.assert_close(result.metrics["mean"], wanted, **TIGHT)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, **TIGHT)
    pipe.close()
    say("replicas")


def scaler() -> None:
    """An overflow on one rank makes all skip the step, and all have the scale that one process has."""
    model, plain = Net(), Net()
    x, y = batch(4)
    pipe = pp.pipeline(model, (x[:ROWS],), targets=y[:ROWS], loss=mean_square, microbatches=4, timeout=30.0)
    mine = dict(pipe.named_parameters())
    optimizer = torch.optim.AdamW(mine.values(), lr=0.1) if mine else None
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    ours = pp.GradScaler(pipe, init_scale=64.0, growth_interval=2)
    torchs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(6):
        pipe.step(x, targets=y, scaler=ours)
        loss_over(plain, x, y, torchs.get_scale())
        torchs.scale(torch.zeros(()))  # it wants to be asked once
        for parameters in (mine, dict(plain.named_parameters())):
            spoilt = {1: "b.route.weight", 4: "a.bias"}.get(step)
            if spoilt in parameters:
                parameters[spoilt].grad.view(-1)[0] = float("nan")
        if step % 2:
            ours.unscale_(optimizer)
            torchs.unscale_(theirs)
            norm = pipe.clip_grad_norm_(0.5)
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            torch.testing.assert_close(norm.double(), wanted, equal_nan=True)
        ours.step(optimizer)
        torchs.step(theirs)
        ours.update()
        torchs.update()
        scales.append(ours.get_scale())
        assert ours.state_dict() == torchs.state_dict()
        for name, parameter in mine.items():
            torch.testing.assert_close(parameter, plain.get_parameter(name), **TIGHT)
            parameter.grad = None
        theirs.zero_grad()
    pipe.close()
    say(scales)


def apart() -> None:
    """A rank that forgets the scaler is told of before anything runs."""
    x, y = batch(4)
    pipe = pp.pipeline(Net(), (x[:ROWS],), targets=y[:ROWS], loss=mean_square, microbatches=4, timeout=30.0)
    scaling = None if dist.get_rank() == 2 else pp.GradScaler(pipe, init_scale=4.0)
    try:
        pipe.step(x, targets=y, scaler=scaling)
    except pp.CallError as error:
        say(str(error).splitlines()[0])
    pipe.close()


def main() -> None:
    """Run the scenarios on gloo."""
    keep_others_apart()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", pp.PpdslWarning)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        say(f"# {name}")
        {"said": said, "replicas": replicas, "scaler": scaler, "apart": apart}[name]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
