"""Random numbers by key: the same for every cut, schedule and placement, in recomputation and in the plain model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import ppdsl as pp
from ppdsl.runtime.randomness import RandomKeys
from ppdsl.runtime.stages.drawing import key_of
from tests.runtime.drawers import KINDS, WIDTH, Net, Once, noisy_loss
from tests.runtime.launch import launch, said

pytestmark = pytest.mark.filterwarnings("ignore:.*backward-not-split")

MICROBATCHES, ROWS = 2, 2
Cuts = Sequence[tuple[int, str]]
"""(block, module of it) from which on the next stage runs."""


def batch() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(5)
    x, y = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=chance, dtype=torch.float64)
    return x, y


def piped(model: nn.Module, **options: Any) -> pp.Pipeline:
    x, y = batch()
    given: dict[str, Any] = {"loss": noisy_loss, "microbatches": MICROBATCHES, "seed": 11} | options
    return pp.pipeline(model, (x[:ROWS],), targets=y[:ROWS], **given)


def cut(kinds: list[str], cuts: Cuts) -> Net:
    net = Net(kinds)
    if cuts:
        pp.begin(net.blocks[0].linear, 0)
    for number, (block, name) in enumerate(cuts):
        pp.begin(getattr(net.blocks[block], name), number + 1)
    return net


def trained(kinds: list[str], cuts: Cuts = (), *, steps: int = 2, **options: Any) -> tuple[list[Tensor], pp.Pipeline]:
    """Return losses, outputs and gradients of a few steps; other random numbers are drawn meanwhile."""
    x, y = batch()
    pipe = piped(cut(kinds, cuts), **options)
    found = []
    for _ in range(steps):
        torch.rand(3)
        before = torch.get_rng_state()
        result = pipe.step(x, targets=y, outputs="all")
        assert torch.equal(torch.get_rng_state(), before)
        found += [result.loss, result.outputs]
    return found + gradients(pipe.module), pipe


def in_the_plain_model(pipe: pp.Pipeline, *, steps: int = 2) -> list[Tensor]:
    x, y = batch()
    pipe.module.zero_grad()
    found = []
    for step in range(steps):
        total, outputs = torch.zeros(()), []
        for m in range(MICROBATCHES):
            rows = slice(ROWS * m, ROWS * (m + 1))
            with pipe.randomness(step=step, microbatch=m):
                output = pipe.module(x[rows])
                loss = noisy_loss(output, y[rows])
                (loss / MICROBATCHES).backward()
            total = total + loss.detach() / MICROBATCHES
            outputs.append(output.detach())
        found += [total, torch.cat(outputs)]
    return found + gradients(pipe.module)


def gradients(model: nn.Module) -> list[Tensor]:
    # Where nothing is learned there is nothing to compare.
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, one, two)) and len(one) == len(two)


WAYS: list[tuple[Cuts, dict[str, Any]]] = [
    ([(1, "linear")], {"schedule": "gpipe", "recompute": True}),
    ([(0, "inner")], {"schedule": "1f1b", "placement": {0: 1, 1: 0}}),
    ([(0, "inner"), (1, "linear"), (1, "inner")], {"schedule": "zbv"}),
    ([(0, "inner"), (1, "linear"), (1, "inner")], {"schedule": "interleaved_1f1b", "recompute": [1, 3]}),
]
SLOW = ("Attention", "Recurrent")
"""These take long to record."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_draws_the_same_however_it_is_cut_and_run(kind: str) -> None:  # UR-122, UR-125
    expected, pipe = trained([kind, kind])
    assert same(in_the_plain_model(pipe), expected)
    for cuts, options in WAYS[2:] if kind in SLOW else WAYS:
        found, _ = trained([kind, kind], cuts, **options)
        assert same(found, expected), (cuts, options)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[str], Cuts, dict[str, Any]]:
    kinds = draw(st.lists(st.sampled_from([kind for kind in KINDS if kind != "Recurrent"]), min_size=2, max_size=3))
    places = [(block, name) for block in range(len(kinds)) for name in ("linear", "inner")][1:]
    cuts = sorted(draw(st.sets(st.sampled_from(places), min_size=1)), key=places.index)
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zero_bubble", "sequential"]))
    again = draw(st.sets(st.integers(0, len(cuts))))
    return kinds, cuts, {"schedule": schedule, "recompute": sorted(again)}


@settings(max_examples=10, deadline=None)
@given(mixtures())
def test_random_models_draw_the_same_however_they_are_cut(case: tuple[list[str], Cuts, dict[str, Any]]) -> None:
    kinds, cuts, options = case
    expected, _ = trained(kinds, steps=1)
    found, _ = trained(kinds, cuts, steps=1, **options)
    assert same(found, expected)


# ---------------------------------------------------------------- what a key is made of


class Masks(nn.Module):
    """Returns what dropout leaves of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.a, self.b = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(len(x), 64, dtype=x.dtype) * self.weight
        with pp.stage(0):
            h = torch.stack([self.a(ones), self.b(ones)], 1)
        with pp.stage(1):
            return torch.cat([h, self.b(ones)[:, None]], 1).detach() + 0 * self.weight


def masks(pipe: pp.Pipeline, *, train: bool = True) -> list[tuple[Any, ...]]:
    """Return every mask of a step, one for each micro-batch and dropout."""
    x, y = batch()
    run = pipe.step if train else pipe.evaluate
    outputs = run(x, targets=y, outputs="all").outputs
    return [tuple(part[:, i].flatten().tolist()) for part in outputs.chunk(MICROBATCHES) for i in range(3)]


def masked(**options: Any) -> pp.Pipeline:
    return piped(
        Masks(), **{"loss": lambda output, target: (output.sum((1, 2)) - target.sum(1)).square().mean()} | options
    )


def test_each_step_micro_batch_and_call_draws_numbers_of_its_own() -> None:
    pipe = masked()
    seen = [*masks(pipe), *masks(pipe), *masks(pipe, train=False), *masks(pipe, train=False)]
    assert len(set(seen)) == len(seen) == 4 * MICROBATCHES * 3
    assert len({*masks(masked(seed=11)), *masks(masked(seed=12))}) == 2 * MICROBATCHES * 3


def test_evaluations_between_steps_change_nothing_about_the_steps() -> None:
    first, second = masked(), masked()
    expected = [masks(first), masks(first)]
    found = [masks(second)]
    with torch.no_grad():
        masks(second)
    masks(second, train=False)
    second(batch()[0])
    assert [*found, masks(second)] == expected


def test_a_refused_call_counts_for_nothing() -> None:
    first, second = masked(), masked()
    expected = masks(first)
    with pytest.raises(pp.CallError):
        second.step(batch()[0][:1])
    assert masks(second) == expected


def test_without_a_seed_it_is_torchs_own() -> None:
    torch.manual_seed(123)
    pipe = masked(seed=None)
    assert masks(pipe) == masks(masked(seed=123))
    torch.manual_seed(124)
    assert masks(masked(seed=None)) != masks(masked(seed=123))


def test_replicas_number_their_micro_batches_on() -> None:
    first = RandomKeys(1).next(training=True, microbatches=4)
    assert RandomKeys(1).next(training=True, microbatches=2, replica=1) == first[2:]


def test_keys_are_the_same_on_every_machine() -> None:
    assert key_of("7 step 0 0") == 0x3BF3B4719B56406D
    pipe = masked()
    names = [[draw.name for draw in program.draws] for program in pipe._main.programs]
    assert names == [["a|0|0", "b|0|0"], ["b|1|0"]]


def test_torchs_generator_keeps_what_stands_in_the_upper_half_of_a_seed_and_does_not_draw_from_it() -> None:
    drawn = []
    for upper in (0, 0x5D000001):
        generator = torch.Generator().manual_seed(upper << 32 | 7)
        drawn.append(torch.rand(3, generator=generator))
        other = torch.Generator().manual_seed(0)
        other.set_state(generator.get_state())
        assert other.initial_seed() == upper << 32 | 7
    assert torch.equal(*drawn)


# ---------------------------------------------------------------- what is left alone


class Sometimes(nn.Module):
    """Draws from a generator of the user's; fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH).double(), nn.Dropout(0.5)
        self.chance = torch.Generator().manual_seed(1)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.drop(self.linear(x)) + torch.rand(WIDTH, generator=self.chance, dtype=x.dtype)
            h.register_hook(self.look)
        with pp.stage(1):
            return h + torch.rand((), dtype=x.dtype)

    def look(self, gradient: Tensor) -> None:
        if self.fails:
            raise ValueError("no")


def test_a_generator_of_the_users_goes_on_as_it_does_in_the_plain_loop() -> None:
    model = Sometimes()
    pipe = piped(model, loss=functional.mse_loss)
    before = torch.Generator().manual_seed(1)
    x, y = batch()
    pipe.step(x, targets=y)
    for _ in range(MICROBATCHES):
        torch.rand(WIDTH, generator=before, dtype=x.dtype)
    assert torch.equal(model.chance.get_state(), before.get_state())


def test_a_failed_step_leaves_generators_and_modules_as_they_were() -> None:
    model = Sometimes()
    pipe = piped(model, loss=functional.mse_loss)
    x, y = batch()
    model.fails = True
    attributes = set(vars(model.drop))
    before = torch.get_rng_state()
    with pytest.raises(pp.RunError, match="ValueError: no"):
        pipe.step(x, targets=y)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(vars(model.drop)) == attributes


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True).double(),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.RReLU()).double().eval(),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.0)).double(),
    ],
    ids=["attention without dropout", "evaluation", "dropout of nothing"],
)
def test_a_stage_that_draws_nothing_pays_nothing(model: Callable[[], nn.Module]) -> None:
    pipe = piped(model(), loss=functional.mse_loss)
    x, y = batch()
    pipe.step(x, targets=y)
    assert [program.draws for program in pipe._main.programs] == [()]
    assert [state.drawing for state in pipe._main.states.values()] == [None]


# ---------------------------------------------------------------- checkpoints


def test_a_resumed_run_draws_what_the_undisturbed_one_would_have_drawn(tmp_path: Path) -> None:
    torch.manual_seed(1)
    pipe = masked(seed=None)
    masks(pipe), masks(pipe), masks(pipe, train=False)
    pp.save(pipe, tmp_path)
    expected = masks(pipe), masks(pipe, train=False), masks(pipe)
    torch.manual_seed(2)
    again = masked(seed=None, placement={0: 0, 1: 0}, schedule="gpipe")
    pp.load(again, tmp_path)
    assert (masks(again), masks(again, train=False), masks(again)) == expected


def test_a_seed_that_was_given_stays_and_rng_false_leaves_all_as_it_is(tmp_path: Path) -> None:
    pipe = masked(seed=1)
    masks(pipe)
    pp.save(pipe, tmp_path)
    other, third = masked(seed=2), masked(seed=2)
    first = masks(third)
    pp.load(other, tmp_path, rng=False)
    assert masks(other) == first
    other = masked(seed=2)
    pp.load(other, tmp_path)
    assert masks(other) == masks(third)


@pytest.mark.distributed
def test_two_processes_draw_what_one_draws_and_one_goes_on_from_them(tmp_path: Path) -> None:
    result = launch(2, str(tmp_path), worker=Path(__file__).with_name("randomness_worker.py"))
    expected = said(result, 0)
    assert expected.startswith("equal equal equal\n"), result.stderr
    assert said(result, 1) == expected
    torch.manual_seed(5)
    again = masked(seed=None)
    pp.load(again, tmp_path)
    assert expected.splitlines()[1:] == [str(hash_of(masks(again))), str(hash_of(masks(again, train=False)))]


def hash_of(found: list[tuple[Any, ...]]) -> int:
    return key_of(repr(found))


# ---------------------------------------------------------------- batch norm


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()).double()
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)).double()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_batch_norm_sees_micro_batches_in_order_as_in_the_plain_loop(  # UR-123, UR-124
    schedule: str, microbatches: int, *, recompute: bool
) -> None:
    x, y = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    rows = 12 // microbatches
    model, plain = Normed(), Normed()
    pipe = pp.pipeline(
        model, (x[:rows],), targets=y[:rows], loss=functional.mse_loss, schedule=schedule, recompute=recompute,
        microbatches=microbatches,
    )  # fmt: skip
    for _ in range(3):
        pipe.step(x, targets=y)
        for m in range(microbatches):
            part = slice(m * rows, (m + 1) * rows)
            (functional.mse_loss(plain(x[part]), y[part]) / microbatches).backward()
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert model.a[1].num_batches_tracked == 3 * microbatches
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_module_that_forward_never_calls_by_name_draws_too() -> None:
    class Passing(Once):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.drop.forward(nn.Dropout(0.3)(self.linear(x))))

    def model(*, in_two: bool) -> nn.Module:
        torch.manual_seed(0)
        made = Passing().double()
        if in_two:
            pp.begin(made.linear, 0)
            pp.begin(made.inner, 1)
        return made

    x, y = batch()
    one, two = (piped(model(in_two=in_two)).step(x, targets=y, outputs="all") for in_two in (False, True))
    assert torch.equal(one.outputs, two.outputs)
    assert one.losses == two.losses
