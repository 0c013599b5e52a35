"""Training on XLA devices equals training the plain model on the CPU, under every kind of schedule."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import ppdsl as pp
from ppdsl.plan.steps import Compute, Send
from ppdsl.plan.ticks import ticks_of
from ppdsl.runtime.transport import make_parcels
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.transport import PermuteCarrier
from ppdsl.schedule.action import ActionKind

pytestmark = pytest.mark.xla

MICROBATCHES, ROWS, WIDTH = 4, 2, 6


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    """Start torch_xla before the first backward of this process."""
    xla_adapter.device_count()


class Net(nn.Module):
    """A chain with a skip, a batch norm and a tie between its first and its last stage."""

    def __init__(self, stages: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.stages = stages
        self.embed = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with pp.stage(0):
            h = skip = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            with pp.stage(number):
                h = torch.tanh(layer(self.drop(h)))
                if number == 1:
                    h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        with pp.stage(self.stages - 1):
            return self.head(h + skip)


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(2)
    rows = ROWS * MICROBATCHES
    return [tuple(torch.randint(9, (2, rows, 5), generator=chance)) for _ in range(steps)]  # type: ignore[misc]


def net(stages: int, **options: Any) -> Net:
    torch.manual_seed(3)
    return Net(stages, **options).double()


def pipeline_of(model: nn.Module, schedule: str = "1f1b", **options: Any) -> pp.Pipeline:
    tokens, targets = batches(1)[0]
    options = {"devices": "xla", "microbatches": MICROBATCHES, "loss": loss_of} | options
    return pp.pipeline(model, (tokens[:ROWS],), targets=targets[:ROWS], schedule=schedule, **options)


def plain_step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = [
        loss_of(model(x), y) / MICROBATCHES
        for x, y in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    ]
    sum(losses).backward()  # type: ignore[union-attr]
    return torch.stack(losses).sum().detach()


def assert_near(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    ours, theirs = ours.detach().cpu(), theirs.detach()
    apart, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
    assert apart <= 1e-9 * max(scale, 1e-3), f"{name} is off by {apart} of {scale}"


def assert_alike(model: nn.Module, plain: nn.Module) -> None:
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (theirs[name].grad is None), name
        if parameter.grad is not None:
            assert_near(f"gradient of {name}", parameter.grad, theirs[name].grad)
        assert_near(name, parameter, theirs[name])
    buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        assert_near(name, buffer, buffers[name])


@pytest.mark.parametrize(
    ("schedule", "stages", "transport"),
    [
        ("1f1b", 4, "permute"),
        ("1f1b", 4, "host"),
        ("gpipe", 3, "permute"),
        ("interleaved_1f1b", 8, "permute"),
        ("zbv", 8, "permute"),
        ("zero_bubble", 4, "host"),
    ],
)
def test_training_equals_the_plain_model(schedule: str, stages: int, transport: str) -> None:
    model = net(stages)
    plain = copy.deepcopy(model)
    options = {"placement": {i: i % 4 for i in range(stages)}} if schedule == "interleaved_1f1b" else {}
    pipe = pipeline_of(model, schedule, transport=transport, **options)
    ours = torch.optim.SGD(pipe.parameters(), lr=0.5, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for number, (tokens, targets) in enumerate(batches(4)):
        before = xla_adapter.counters()
        result = pipe.step(tokens, targets=targets)
        counted = xla_adapter.counters().since(before)
        assert_near("loss", result.loss, plain_step(plain, tokens, targets))
        if number >= 2:
            assert counted.compilations == 0
        ours.step()
        theirs.step()
        assert_alike(model, plain)
        ours.zero_grad()
        theirs.zero_grad()


def moves_of(pipe: pp.Pipeline, devices: int) -> int:
    """Return how many permutations the plan needs: in each tick those rounds of pairs that have something to say."""
    carrier = PermuteCarrier(xla_adapter.device_of, devices)
    parcels = make_parcels(pipe.plan, [pipe.graph] * MICROBATCHES)
    carrier.plan(parcels.values())
    moves = 0
    for turns in ticks_of(pipe.plan):
        messages = Counter(
            ((parcels[m].layout.shape, parcels[m].layout.dtype), (int(m.source), int(m.target)))
            for turn in turns
            for m in turn.needs
        )
        for kind, rounds in carrier.rounds().items():
            moves += sum(max(messages[kind, pair] for pair in pairs) for pairs in rounds)
    return moves


@pytest.mark.parametrize("transport", ["host", "permute"])
@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 4), ("1f1b", 4), ("interleaved_1f1b", 8), ("zbv", 8)])
def test_a_steady_step_starts_and_copies_what_the_plan_says(schedule: str, stages: int, transport: str) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(stages)))
    for number, layer in enumerate(model):
        pp.begin(layer, number)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    pipe = pp.pipeline(
        model, (x[:ROWS],), targets=x[:ROWS], loss=nn.functional.mse_loss, microbatches=MICROBATCHES, devices="xla",
        schedule=schedule, transport=transport,
        placement={i: i % 4 for i in range(stages)} if schedule == "interleaved_1f1b" else None,
    )  # fmt: skip
    steps = [step for row in pipe.plan.rows for step in row]
    actions = [step.action for step in steps if isinstance(step, Compute)]
    # Nothing enters the first stage that has a gradient, so its I has nothing to start.
    started = sum(action.kind is not ActionKind.INPUT_GRAD or action.stage > 0 for action in actions)
    messages = sum(isinstance(step, Send) for step in steps)
    assert messages == 2 * MICROBATCHES * sum(a != b for a, b in pairwise(pipe.schedule.placement))
    devices = xla_adapter.device_count()
    over_host = messages if transport == "host" else 0
    programs = moves_of(pipe, devices) * devices if transport == "permute" else 0
    for number in range(4):
        before = xla_adapter.counters()
        pipe.step(x, targets=x)
        counted = xla_adapter.counters().since(before)
        if number >= 2:
            assert counted == xla_adapter.Counters(
                launches=started + programs,
                compilations=0,
                downloads=MICROBATCHES + over_host,  # the losses
                uploads=3 * MICROBATCHES + over_host,  # inputs, targets, and the weights of the losses
            )


class Picking(nn.Module):
    """Goes through the rows of a tensor that it makes: views of views."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        picked = torch.zeros_like(h)
        for row in (h.detach().sum(-1) > 0).nonzero():
            picked.index_add_(0, row, h[row[0]].unsqueeze(0) * 2)
        return h + picked


def test_views_of_what_a_stage_makes_are_right_in_the_first_step_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), Picking())).double()
    pp.begin(model[1], 1)
    plain = copy.deepcopy(model)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    pipe = pp.pipeline(model, (x[:3],), targets=(), loss=mean_square, microbatches=2, devices="xla")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PpdslWarning)  # which rows there are is read from the device
            loss = pipe.step(x).loss
        losses = [mean_square(plain(part)) / 2 for part in x.chunk(2)]
        sum(losses).backward()  # type: ignore[union-attr]
        assert_near("loss", loss, torch.stack(losses).sum().detach())
        assert_alike(model, plain)


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def test_dropout_is_the_same_under_every_schedule_and_transport() -> None:
    found = []
    for schedule, stages, transport in [("1f1b", 4, "permute"), ("gpipe", 4, "host"), ("zero_bubble", 4, "permute")]:
        model = net(stages, dropout=0.5)
        pipe = pipeline_of(model, schedule, transport=transport, seed=7)
        losses = [float(pipe.step(*batches(1)[0][:1], targets=batches(1)[0][1]).loss) for _ in range(2)]
        found.append((losses, [p.grad.cpu() for p in model.parameters()]))
    assert found[0][0][0] != found[0][0][1], "another step draws other numbers"
    for losses, gradients in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-12)
        for ours, theirs in zip(gradients, found[0][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputed_stages_give_the_same_numbers(dropout: float) -> None:
    tokens, targets = batches(1)[0]
    found = []
    for recompute in (False, True):
        model = net(4, dropout=dropout)
        pipe = pipeline_of(model, recompute=recompute, seed=7)
        losses = []
        for number in range(3):
            before = xla_adapter.compilations()
            losses.append(float(pipe.step(tokens, targets=targets).loss))
            assert number < 2 or xla_adapter.compilations() == before
        found.append((losses, [t.cpu() for t in (*(p.grad for p in model.parameters()), *model.buffers())]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_whole_run_with_clipping_frozen_stages_adamw_and_evaluation() -> None:
    model = net(4)
    for parameter in model.layers[2].parameters():
        parameter.requires_grad_(False)
    plain = copy.deepcopy(model)
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)  # made before the parameters move
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    pipe = pipeline_of(model)
    for number, (tokens, targets) in enumerate(batches(4)):
        before = xla_adapter.compilations()
        result = pipe.step(tokens, targets=targets)
        norm = pipe.clip_grad_norm_(0.1)
        ours.step()
        ours.zero_grad(set_to_none=False)
        assert number < 2 or xla_adapter.compilations() == before
        assert_near("loss", result.loss, plain_step(plain, tokens, targets))
        assert_near("norm", norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        theirs.step()
        theirs.zero_grad()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.device.type == "xla"
        torch.testing.assert_close(one.detach().cpu(), other, rtol=1e-7, atol=1e-9, msg=name)
    tokens, targets = batches(1)[0]
    model.eval()
    plain.eval()
    result = pipe.evaluate(tokens, targets=targets, outputs="all")
    assert result.outputs.device.type == "cpu"
    torch.testing.assert_close(result.outputs, plain(tokens), rtol=1e-7, atol=1e-9)
    state = {name: value.cpu() for name, value in pipe.state_dict().items()}
    assert list(state) == list(plain.state_dict())
    again = net(4)
    other = pipeline_of(again, transport="host")
    other.load_state_dict(state)
    again.eval()
    torch.testing.assert_close(other(tokens), result.outputs, rtol=1e-9, atol=1e-12)


def test_gpt2_of_transformers_trains_in_float32_as_on_the_cpu() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    plain = copy.deepcopy(model)
    pp.begin(model.transformer.h[1], 1)

    def next_token(output: Any, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    tokens = torch.randint(31, (MICROBATCHES, 8))
    pipe = pp.pipeline(
        model, (tokens[:1],), targets=tokens[:1], loss=next_token, microbatches=MICROBATCHES, devices="xla"
    )
    ours = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for _ in range(2):
        result = pipe.step(tokens, targets=tokens)
        losses = [next_token(plain(row), row) / MICROBATCHES for row in tokens.split(1)]
        sum(losses).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(result.loss, torch.stack(losses).sum().detach(), rtol=1e-5, atol=0.0)
        largest = max(float(p.grad.abs().max()) for p in plain.parameters())
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert float((one.grad.cpu() - other.grad).abs().max()) <= 1e-5 * largest, name
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pp.unmark(model)


@pytest.mark.parametrize("outside", ["xla", "cpu", None])
def test_autocast_around_a_step_or_inside_forward_reaches_the_stages(outside: str | None) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(
                x.device.type, torch.bfloat16, enabled=outside is None or torch.is_autocast_enabled("cpu")
            ):
                with pp.stage(0):
                    h = torch.softmax(self.one(x), -1)
                with pp.stage(1):
                    return self.two(self.norm(h))

    def loss(y: torch.Tensor) -> torch.Tensor:
        types.add(y.dtype)
        return y.float().square().mean()

    found, types = [], set()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for devices in (None, "xla"):
        torch.manual_seed(0)
        model = Casting()
        pipe = pp.pipeline(model, (x[:2],), loss=loss, microbatches=4, devices=devices, targets=())
        around = None if outside is None else ("cpu" if devices is None else outside)
        with torch.autocast(around, torch.bfloat16) if around else nullcontext():
            value = pipe.step(x).loss
        assert types == {torch.bfloat16} if outside is None else torch.bfloat16 in types
        found.append((value, [parameter.grad.cpu() for parameter in model.parameters()]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-2, atol=1e-3)
    largest = max(float(gradient.abs().max()) for gradient in found[0][1])
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).abs().max()) <= 2e-2 * largest


class Saying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with pp.stage(0):
            h = self.one(x)
            pp.aux_loss(h.square().mean(), weight=0.5)
            pp.metric("size", h.detach().abs().mean())
        with pp.stage(1):
            return self.two(h)


@pytest.mark.parametrize("recompute", [False, True])
def test_auxiliary_losses_and_metrics_are_heard(recompute: bool) -> None:
    found = []
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for devices in (None, "xla"):
        torch.manual_seed(0)
        model = Saying().double()
        pipe = pp.pipeline(
            model, (x[:2],), loss=torch.mean, microbatches=4, devices=devices, targets=(), recompute=recompute
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*not recomputed: it says")
            result = pipe.step(x)
        found.append((result.loss, result.aux, result.metrics["size"], [p.grad.cpu() for p in model.parameters()]))
    for ours, theirs in zip(found[1][:3], found[0][:3], strict=True):
        assert float(ours) == pytest.approx(float(theirs), rel=1e-9)
    for ours, theirs in zip(found[1][3], found[0][3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("transport", ["permute", "host"])
def test_micro_batches_of_two_sizes_share_the_copies_of_tied_parameters(transport: str) -> None:
    model = net(4)
    model.norm = nn.Identity()
    plain = copy.deepcopy(model)
    pipe = pipeline_of(model, transport=transport)
    tokens, targets = (tensor[:7] for tensor in batches(1)[0])
    for _ in range(2):
        loss = pipe.step(tokens, targets=targets).loss
        expected = loss_of(plain(tokens), targets)
        expected.backward()
        assert_near("loss", loss, expected.detach())
        assert_alike(model, plain)
