"""What the processes of a test of collectives run: `collective_worker.py SCENARIO...`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ppdsl as pp
from ppdsl.recording.record import record_call
from tests.runtime.saying import keep_others_apart, say

Y = torch.ones(4, 6, dtype=torch.float64)


def inputs() -> Tensor:
    return torch.arange(24, dtype=torch.float64).reshape(4, 6) / 24


class Summed(torch.autograd.Function):
    """The sum over ranks, each of which keeps its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Layer(nn.Module):
    """A layer whose result is summed over ranks; the weights of rank 1 are twice those of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Summed.apply(self.layer(x))


class Normed(Layer):
    """Takes off the mean over the rows of all ranks, by a collective on statistics alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


class Functional(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + functional.all_reduce(x.detach(), "sum", dist.group.WORLD)


class Two(nn.Module):
    """Two stages; `between` runs in code that is taken apart."""

    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = layer(), nn.Linear(6, 6)
        with torch.no_grad():
            for parameter in self.a.parameters():
                parameter *= 1 + dist.get_rank()

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        h = self.between(h)
        with pp.stage(1):
            return self.b(h)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


class LossOfAll(nn.Module):
    """A loss that is a module, called whole: its collective is its own business."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        count = torch.ones(())
        dist.all_reduce(count)
        return mean_square(output, target) / count


def kept() -> None:
    """Collectives inside modules called whole, and those of DTensors, are run with the stages that they belong to."""
    for name, make, loss in (
        ("a module", Two, mean_square),
        ("statistics", lambda: Two(Normed), mean_square),
        ("functional", lambda: Two(Functional), mean_square),
        ("a loss module", lambda: Two(nn.Identity), LossOfAll()),
        ("tensor-parallel", Parallel, mean_square),
        ("tensor-parallel layers", ParallelLayers, mean_square),
    ):
        model, plain = make().double(), make().double()
        pipe = pp.pipeline(
            model, (inputs()[:2],), targets=Y[:2], loss=loss, microbatches=2, runtime="inprocess", schedule="gpipe"
        )
        result = pipe.step(inputs(), targets=Y)
        losses = [loss(plain(x), y) for x, y in zip(inputs().chunk(2), Y.chunk(2), strict=True)]
        (sum(losses) / 2).backward()
        torch.testing.assert_close(result.loss, sum(losses).detach() / 2, rtol=0, atol=1e-10)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(one.grad), whole(other.grad), rtol=0, atol=1e-10)
        say(name)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(self, mesh, plan)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Parallel(Two):
    """Code between modules that asks for a DTensor as a plain tensor, which gathers it."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.a = Mlp()

    def between(self, h: Tensor) -> Tensor:
        return h.redistribute(placements=[Replicate()]).to_local()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.between(self.a(x))
        with pp.stage(1):
            return self.b(h)


class ParallelLayers(Parallel):
    """Tensor-parallel layers that are called one by one."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a.down(self.a.up(x).relu()).full_tensor()
        with pp.stage(1):
            return self.b(h)


def _object(h: Tensor) -> Tensor:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, 2)
    return h * found[0]


def _gather(h: Tensor) -> Tensor:
    parts = [torch.empty_like(h) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, h)
    return parts[0]


def _message(h: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.zeros(2), 0)
    return h


def _constant(h: Tensor) -> Tensor:
    count = torch.ones(())
    dist.all_reduce(count)
    return h / count


def _caught(h: Tensor) -> Tensor:
    try:
        dist.broadcast(h, 0)
    except Exception:
        return h
    return h


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce, async": lambda h: dist.all_reduce(h, async_op=True).wait(),
    "all_reduce, differentiable": differentiable.all_reduce,
    "all_reduce, functional": lambda h: functional.all_reduce(h, "sum", dist.group.WORLD),
    "all_reduce, of a constant": _constant,
    "all_reduce, of the group": lambda h: dist.group.WORLD.allreduce([h]).wait(),
    "all_gather": _gather,
    "all_gather_object": _object,
    "barrier": lambda h: dist.barrier(),
    "broadcast": lambda h: dist.broadcast(h, 0),
    "broadcast, caught": _caught,
    "message": _message,
    "function": Summed.apply,
}


def refused() -> None:
    """In code that is taken apart, each is found when the pipeline is made."""
    for name, function in REFUSED.items():

        class Between(Two):
            def between(self, h: Tensor) -> Tensor:
                result = function(h)  # noqa: B023
                return result if isinstance(result, Tensor) and result.shape == h.shape else h

        def loss(output: Tensor, target: Tensor) -> Tensor:
            function(output)  # noqa: B023
            return mean_square(output, target)

        model, plain = Between(nn.Identity).double(), Two(nn.Identity).double()
        say(f"{name}: {found(lambda: record_call(model, (inputs(),)))}")  # noqa: B023
        say(f"{name}: {found(lambda: record_call(plain, (inputs(),), loss=loss, targets=(Y,)))}")  # noqa: B023


def found(record: Callable[[], object]) -> str:
    try:
        record()
    except pp.PpdslError as error:
        (diagnostic,) = error.diagnostics
        (label,) = diagnostic.labels
        line = Path(label.span.file).read_text(encoding="utf-8").splitlines()[label.span.line - 1].strip()
        return f"{diagnostic.code} | {diagnostic.message.partition(', in code')[0]} | {line}"
    return "recorded"


def text() -> None:
    """The whole error, of a whole pipeline."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        dist.broadcast(target, 0)
        return mean_square(output, target)

    try:
        pp.pipeline(Two(nn.Identity).double(), (inputs(),), targets=Y, loss=loss, microbatches=1)
    except pp.PpdslError as error:
        say(error)


if __name__ == "__main__":
    keep_others_apart()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for scenario in sys.argv[1:]:
        say(f"# {scenario}")
        globals()[scenario]()
    dist.barrier()
    dist.destroy_process_group()
