"""What each of two processes runs that own two XLA devices each; `xla_hosts_worker.py SCENARIO...`.

Every scenario says what it found, or which error ended it. Numbers are compared with those of the plain model on the
CPU, which every process computes by itself.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.runtime.xla import adapter as xla_adapter
from tests.runtime.saying import keep_others_apart, say

MICROBATCHES, ROWS, WIDTH, TOKENS = 4, 2, 6, 9
TIMEOUT = 20.0

Loss = Callable[..., Tensor]


class Net(nn.Module):
    """A chain with a skip connection and a tie from the first to the last stage, and perhaps batch norms."""

    def __init__(self, stages: int, *, norms: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stages = stages
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2 * norms))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        # In float32 batch norms of XLA differ from torch's in more digits than those that are compared.
        self.to(torch.float64 if norms else torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:
        with pp.stage(0):
            h = skip = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            with pp.stage(number):
                h = self.layer(number, layer, h)
                if self.norms and number in (1, self.stages - 2):
                    h = self.norms[number == 1](h.transpose(1, 2)).transpose(1, 2)
        with pp.stage(self.stages - 1):
            return self.head(h + skip)

    def layer(self, number: int, layer: nn.Module, h: Tensor) -> Tensor:
        return torch.tanh(layer(h))


class Mixed(nn.Module):
    """Edges between processes that carry integers, truth values, and values without a gradient; one stage is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.layers[0](self.embed(tokens))
            wanted = tokens > 2
            place = tokens.flip(1)
            scale = h.detach().abs().mean()
        with pp.stage(1):
            h = torch.tanh(self.layers[1](h))
        with pp.stage(2):
            h = torch.where(wanted.unsqueeze(-1), self.layers[2](h), h) * scale
        with pp.stage(3):
            picked = torch.gather(h, 1, (place % tokens.shape[1]).unsqueeze(-1).expand(-1, -1, WIDTH))
            return self.head(picked + self.layers[3](h))


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(2)
    rows = ROWS * MICROBATCHES
    made = [torch.randint(TOKENS, (2, rows, 5), generator=chance) for _ in range(steps)]
    return [(each[0], each[1]) for each in made]


def pipeline_of(model: nn.Module, schedule: str = "1f1b", **options: Any) -> pp.Pipeline:
    tokens, targets = batches(1)[0]
    given: dict[str, Any] = {"devices": "xla", "microbatches": MICROBATCHES, "loss": loss_of, "timeout": TIMEOUT}
    return pp.pipeline(model, (tokens[:ROWS],), targets=targets[:ROWS], schedule=schedule, **(given | options))


def plain_step(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    losses = [
        loss_of(model(x), y) / MICROBATCHES
        for x, y in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    ]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).sum().detach()


def require_near(name: str, ours: Tensor | None, theirs: Tensor | None) -> None:
    if ours is None or theirs is None:
        raise AssertionError(f"{name} is missing")
    ours, theirs = ours.detach().cpu(), theirs.detach()
    apart = float((ours.double() - theirs.double()).abs().max())
    scale = max(float(theirs.abs().max()), 1e-2)
    if not apart <= (1e-9 if theirs.dtype == torch.float64 else 1e-5) * scale:
        raise AssertionError(f"{name} is off by {apart} of {scale}")


def require_alike(pipe: pp.Pipeline, model: nn.Module, plain: nn.Module) -> int:
    """Compare this process's parameters, gradients and buffers; return how many parameters those are."""
    theirs = dict(plain.named_parameters())
    count = 0
    for name, parameter in pipe.named_parameters():
        if (parameter.grad is None) != (theirs[name].grad is None):
            raise AssertionError(f"{name} has a gradient on one side alone")
        if parameter.grad is not None:
            require_near(f"the gradient of {name}", parameter.grad, theirs[name].grad)
        require_near(name, parameter, theirs[name])
        if parameter.device.type != "xla":
            raise AssertionError(f"{name} is on {parameter.device}")
        count += 1
    owned = pipe.state_dict()
    for name, buffer in plain.named_buffers():
        if name in owned:
            require_near(name, owned[name], buffer)
    return count


def train(
    model: nn.Module, schedule: str = "1f1b", steps: int = 4, clip: float | None = None, **options: Any
) -> pp.Pipeline:
    """Train beside the plain model and compare all numbers after each step."""
    plain = copy.deepcopy(model)
    pipe = pipeline_of(model, schedule, **options)
    ours = torch.optim.SGD(pipe.parameters(), lr=0.5, momentum=0.9)
    theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    compiled = []
    count = 0
    for tokens, targets in batches(steps):
        before = xla_adapter.compilations()
        result = pipe.step(tokens, targets=targets)
        require_near("the loss", result.loss, plain_step(plain, tokens, targets))
        if clip is not None:
            norm = pipe.clip_grad_norm_(clip)
            require_near("the norm", norm, nn.utils.clip_grad_norm_(plain.parameters(), clip))
        ours.step()
        theirs.step()
        compiled.append(xla_adapter.compilations() - before)
        count = require_alike(pipe, model, plain)
        ours.zero_grad()
        theirs.zero_grad()
    if any(compiled[2:]):
        raise AssertionError(f"programs compiled in each step: {compiled}")
    say(f"{schedule}: {count} parameters, {len(pipe.plan.rows)} ranks, {pipe.explain()['transport']['name']}")
    return pipe


# -------------------------------------------------------------------- scenarios


def schedules() -> None:
    """Every kind of schedule, with both transports within a process."""
    train(Net(4), "1f1b", transport="permute").close()
    train(Net(4), "gpipe", transport="host").close()
    train(Net(8), "interleaved_1f1b", placement={i: i % 4 for i in range(8)}).close()
    train(Net(8), "zbv").close()
    train(Net(4, norms=True), "1f1b").close()


def traffic() -> None:
    """Tensors are copied to the host for other processes alone, and losses for the caller."""
    pipe = train(Mixed(), transport="permute")
    tokens, targets = batches(1)[0]
    before = xla_adapter.counters()
    pipe.step(tokens, targets=targets)
    counted = xla_adapter.counters().since(before)
    here = range(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    leaving = sum(message.source in here and message.target not in here for message in pipe.plan.messages)
    losses = MICROBATCHES if 3 in here else 0
    say(f"{leaving} messages leave, {counted.downloads - losses} copies to the host, {counted.compilations} compiled")
    pipe.close()
    names = [thread.name for thread in threading.enumerate()]
    say(f"outbox left: {'ppdsl outbox' in names}")


def edges() -> None:
    """Integers, truth values, values without a gradient, frozen parameters, between processes."""
    train(Mixed()).close()


def whole_run() -> None:
    """Clipping, evaluation, outputs, a timeline, the state under plain names, a checkpoint that another one loads."""
    model = Net(4, norms=True)
    pipe = train(model, clip=0.1)
    tokens, targets = batches(1)[0]
    plain = Net(4, norms=True)
    state = pipe.full_state_dict()
    say(f"state: {list(state) == list(plain.state_dict())}, {len(pipe.state_dict())} of {len(state)}")
    plain.load_state_dict(state)
    require_alike(pipe, model, plain)
    model.eval()
    plain.eval()
    result = pipe.evaluate(tokens, targets=targets, outputs="all", timeline=True)
    require_near("the outputs", result.outputs, plain(tokens))
    require_near("the same", pipe(tokens), plain(tokens))
    times = result.timeline.events if result.timeline is not None else ()
    say(f"times of {len({event.rank for event in times})} ranks")
    model.train()
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.step(tokens, targets=targets)
    optimizer.step()
    plain.load_state_dict(pipe.full_state_dict())
    with shared_folder() as folder:
        pp.save(pipe, folder, optimizer)
        other = Net(4, norms=True)
        again = pipeline_of(other, "gpipe")
        loaded = torch.optim.AdamW(again.parameters())
        pp.load(again, folder, loaded)
        other.eval()
        require_near("the outputs of what was loaded", again(tokens), plain(tokens))
        say(f"saved: {sorted(path.name for path in folder.iterdir() if path.is_dir())}")
        say(f"loaded: {len(loaded.state)} of {len(list(again.parameters()))}")
    again.close()
    pipe.close()


def few_ranks() -> None:
    """A process with one rank; one with none, and more ranks than devices, are refused."""
    train(Net(3)).close()
    say(failure_of(lambda: pipeline_of(Net(2))))
    say(failure_of(lambda: pipeline_of(Net(5), placement={i: i for i in range(5)})))


def other_rows() -> None:
    """Batches of other sizes, whose micro-batches differ."""
    model = Net(4)
    plain = copy.deepcopy(model)
    pipe = pipeline_of(model)
    for rows in (7, 3, 8):
        tokens, targets = (each[:rows] for each in batches(1)[0])
        loss = loss_of(plain(tokens), targets)
        loss.backward()
        require_near("the loss", pipe.step(tokens, targets=targets).loss, loss.detach())
        require_alike(pipe, model, plain)
    pipe.close()
    say("alike")


def refusals() -> None:
    """What cannot be is refused by both processes."""
    say(failure_of(lambda: pipeline_of(Net(4), mesh={"dp": 2})))
    say(failure_of(lambda: pipeline_of(Net(4), transport="permute" if dist.get_rank() else "pigeon")))
    backends, dist.get_backend_config = dist.get_backend_config, lambda: "cpu:gloo,xla:xla"
    say(failure_of(lambda: pipeline_of(Net(4))))
    dist.get_backend_config = backends
    pipe = pipeline_of(Net(4))
    tokens, targets = batches(1)[0]
    say(failure_of(lambda: pipe.step(tokens[dist.get_rank() :], targets=targets[dist.get_rank() :])))
    pipe.step(tokens, targets=targets)
    pipe.close()


def failures() -> None:
    """A stage fails, in the first process or in the second one; both say so, and a new pipeline trains."""
    for stage in (1, 2):
        model = Faulty(stage)
        pipe = pipeline_of(model)
        tokens, targets = batches(1)[0]
        pipe.step(tokens, targets=targets)
        model.fault.armed = True
        say(failure_of(lambda: pipe.step(tokens, targets=targets)))  # noqa: B023 - called at once
        say(failure_of(lambda: pipe.step(tokens, targets=targets)))  # noqa: B023 - called at once
        pipe.close()
    train(Net(4), steps=3).close()


def unsent() -> None:
    """A tensor that a device has computed cannot be sent."""
    pipe = pipeline_of(Net(4))
    tokens, targets = batches(1)[0]
    pipe.step(tokens, targets=targets)
    copy_of, main_thread = xla_adapter.host_copy, threading.main_thread()

    def failing(tensor: Tensor) -> Tensor:
        if threading.current_thread() is not main_thread and dist.get_rank() == 0:
            raise RuntimeError("Out of memory allocating 8 bytes.")
        return copy_of(tensor)

    xla_adapter.host_copy = failing
    say(failure_of(lambda: pipe.step(tokens, targets=targets)))
    xla_adapter.host_copy = copy_of
    pipe.close()


def killed() -> None:
    """The second process is killed while it runs a stage."""
    model = Faulty(2)
    pipe = pipeline_of(model)
    tokens, targets = batches(1)[0]
    pipe.step(tokens, targets=targets)
    model.fault.armed = model.fault.kills = True
    begun = time.monotonic()
    say(failure_of(lambda: pipe.step(tokens, targets=targets)))
    say(f"in time: {time.monotonic() - begun < TIMEOUT}")
    sys.stdout.flush()
    # Without its store a process has nobody to say good-bye to.
    os._exit(0)


# -------------------------------------------------------------------- helpers


class Fault(nn.Module):
    """Fails in micro-batch 2 when it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = self.kills = False
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        if self.armed and type(h) is Tensor:
            self.calls += 1
            if self.calls == 3 and self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.calls == 3:
                raise ValueError("the ink is spilled")
        return h * 1.0


class Faulty(Net):
    """A net with a stage that can fail."""

    def __init__(self, stage: int) -> None:
        super().__init__(4)
        self.fault = Fault()
        self.faulty = stage

    def layer(self, number: int, layer: nn.Module, h: Tensor) -> Tensor:
        h = super().layer(number, layer, h)
        return self.fault(h) if number == self.faulty else h


def failure_of(call: Callable[[], Any]) -> str:
    """Return what a call raises."""
    try:
        call()
    except pp.PpdslError as error:
        return str(error)
    return "nothing"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Give both processes one folder."""
    with tempfile.TemporaryDirectory() as own:
        names: list[Any] = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()


SCENARIOS = {
    made.__name__: made
    for made in (schedules, traffic, edges, whole_run, few_ranks, other_rows, refusals, failures, unsent, killed)
}


def main(names: Sequence[str]) -> None:
    keep_others_apart()
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2", XLA_THREAD_POOL_SIZE="16")
    warnings.simplefilter("error", pp.PpdslWarning)
    xla_adapter.device_count()
    dist.init_process_group("gloo")
    for name in names:
        say(f"# {name}")
        SCENARIOS[name]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
