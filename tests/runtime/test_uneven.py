from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import ppdsl as pp
from ppdsl.graph.shapes import chain_graph
from ppdsl.plan.laws import verify_schedule
from ppdsl.runtime.batches.split import near_equal
from ppdsl.schedule.registry import build_schedule
from ppdsl.schedule.restricting import first_microbatches
from ppdsl.schedule.table import Schedule
from tests.runtime.every_family import SCHEDULES, options_for
from tests.runtime.models import CASES, Case
from tests.runtime.shapes import UNet
from tests.runtime.uneven import apart, make, plain_uneven, rows_of, sizes_of


def _images(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 2, 5, 5, dtype=torch.float64),)


UNET = Case("unet", lambda: UNet(4), _images, _images, functional.mse_loss, (0, 1, 2, 3))
AXES = {"x": 0, "targets[0]": 0, "output": 0}


@settings(max_examples=8, phases=(Phase.explicit, Phase.generate))
@given(
    case=st.sampled_from([name for name in CASES if name not in ("strided", "norm")]),
    rows=st.integers(1, 11),
    microbatches=st.integers(2, 5),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero_bubble(h1)"]),
)
@example(case="chain", rows=2, microbatches=4, schedule="1f1b")  # UR-053
@example(case="chain", rows=10, microbatches=4, schedule="gpipe")  # UR-054
@example(case="fan_out", rows=7, microbatches=2, schedule="1f1b")  # UR-054
@example(case="tied", rows=9, microbatches=4, schedule="zero_bubble(h1)")
def test_a_batch_of_any_size_trains_like_the_plain_loop_over_the_same_micro_batches(
    case: str, rows: int, microbatches: int, schedule: str
) -> None:
    kind = CASES[case]
    model, plain = kind.model(), kind.model()
    pipe = make(kind, model, microbatches, schedule=schedule)
    inputs, targets = rows_of(kind, rows)
    result = pipe.step(*inputs, targets=targets or None, outputs="all")
    assert apart(pipe, result, plain, *plain_uneven(kind, plain, rows, microbatches)) == []
    assert result.counted == rows
    assert len(result.losses) == min(rows, microbatches)


@pytest.mark.parametrize("rows", [10, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_uneven_batches(schedule: str, rows: int) -> None:  # UR-053, UR-054
    model, plain = UNET.model(), UNET.model()
    pipe = make(UNET, model, 4, batch_axis=AXES, **options_for(schedule, 4, 2))
    inputs, targets = rows_of(UNET, rows)
    result = pipe.step(*inputs, targets=targets, outputs="all")
    assert apart(pipe, result, plain, *plain_uneven(UNET, plain, rows, 4)) == []


def test_batch_norm_sees_the_micro_batches_of_an_uneven_batch_as_the_plain_loop_does() -> None:
    case = CASES["norm"]
    model, plain = case.model(), case.model()
    pipe = make(case, model)
    for rows in (11, 8, 9):
        inputs, targets = rows_of(case, rows)
        result = pipe.step(*inputs, targets=targets)
        assert apart(pipe, result, plain, *plain_uneven(case, plain, rows, 4)) == []


@pytest.mark.parametrize("recompute", [False, True])
def test_steps_of_all_sizes_add_up_in_the_same_parameters(recompute: bool) -> None:
    case = CASES["tied"]
    model, plain = case.model(), case.model()
    pipe = make(case, model, recompute=recompute)
    ours, theirs = torch.optim.AdamW(pipe.parameters(), lr=0.05), torch.optim.AdamW(plain.parameters(), lr=0.05)
    before = list(pipe.parameters())
    for rows in (8, 5, 1, 16, 8, 3):
        inputs, targets = rows_of(case, rows)
        result = pipe.step(*inputs, targets=targets)
        assert apart(pipe, result, plain, *plain_uneven(case, plain, rows, 4)) == [], rows
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert all(one is two for one, two in zip(before, pipe.parameters(), strict=True))


def test_the_mean_over_rows_and_the_sum_do_not_depend_on_the_micro_batches() -> None:
    case = CASES["chain"]
    inputs, targets = rows_of(case, 7)
    plain = case.model()
    mean = functional.mse_loss(plain(*inputs), *targets)
    total = functional.mse_loss(plain(*inputs), *targets, reduction="sum")
    for microbatches in (1, 2, 3, 4, 7):
        pipe = make(case, case.model(), microbatches)
        torch.testing.assert_close(pipe.step(*inputs, targets=targets).loss, mean.detach(), rtol=1e-12, atol=1e-12)
        summed = pp.pipeline(
            case.model(),
            (inputs[0][:2],),
            targets=targets[0][:2],
            loss=lambda a, b: functional.mse_loss(a, b, reduction="sum"),
            reduction="sum",
            microbatches=microbatches,
        )
        result = summed.step(*inputs, targets=targets)
        torch.testing.assert_close(result.loss, total.detach(), rtol=1e-12, atol=1e-12)
        assert result.counted is None


def test_a_function_weighs_uneven_micro_batches_by_their_tensors() -> None:
    case = CASES["chain"]
    inputs, targets = rows_of(case, 7)
    pipe = make(case, case.model(), 3, reduction=lambda part, whole: part["x"].shape[0] / whole["x"].shape[0])
    expected = functional.mse_loss(case.model()(*inputs), *targets).detach()
    torch.testing.assert_close(pipe.step(*inputs, targets=targets).loss, expected, rtol=1e-12, atol=1e-12)


class Tokens(nn.Module):
    """Token ids in, scores of the next token out; any length."""

    def __init__(self, words: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(words, width), nn.Linear(width, width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with pp.stage(0):
            h = self.embed(tokens)
        with pp.stage(1):
            h = h + torch.cumsum(torch.tanh(self.mix(h)), 1)
        with pp.stage(2):
            return self.head(h)


def cross_entropy(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def tokens_of(rows: int, length: int, ignored: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + length)
    targets = torch.randint(0, 11, (rows, length))
    targets.flatten()[:ignored] = -100
    return torch.randint(0, 11, (rows, length)), targets


@pytest.mark.parametrize("rows", [8, 7, 3])
def test_the_mean_over_tokens_of_an_uneven_batch_is_that_of_the_whole_batch(rows: int) -> None:  # UR-042
    torch.manual_seed(0)
    model = Tokens().double()
    x, y = tokens_of(2, 5)
    pipe = pp.pipeline(
        model, (x,), targets=y, loss=cross_entropy, microbatches=4, reduction="token_mean",
        batch_axis={"tokens": 0, "targets[0]": 0},
    )  # fmt: skip
    x, y = tokens_of(rows, 5, ignored=7)
    result = pipe.step(x, targets=y)
    expected = cross_entropy(model(x), y)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    assert result.counted == rows * 5 - 7
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def test_the_loss_of_a_data_set_with_a_ragged_last_batch_is_the_mean_over_its_rows() -> None:  # UR-043, UR-059
    case = CASES["chain"]
    model = case.model()
    pipe = make(case, model)
    (x,), (y,) = rows_of(case, 21)
    with torch.no_grad():
        expected, outputs = functional.mse_loss(model(x), y), model(x)
    for size in (8, 5):
        results = [
            pipe.evaluate(x[at : at + size], targets=y[at : at + size], outputs="all") for at in range(0, 21, size)
        ]
        assert [result.counted for result in results] == [len(part) for part in x.split(size)]
        assert pp.mean_loss(results) == pytest.approx(float(expected), rel=1e-12)
        joined = torch.cat([result.outputs for result in results])
        torch.testing.assert_close(joined, outputs, rtol=1e-12, atol=1e-12)


def test_the_mean_over_several_batches_weighs_their_targets() -> None:  # UR-043
    results = [pp.runtime.outcome.StepResult(torch.tensor(loss), counted=n) for loss, n in ((3.0, 1), (7 / 6, 6))]
    assert pp.mean_loss(results) == pytest.approx(10 / 7)
    nothing = pp.runtime.outcome.StepResult(torch.tensor(float("nan")), counted=0)
    assert pp.mean_loss([*results, nothing]) == pytest.approx(10 / 7)
    for bad, text in (([nothing], "nothing"), ([pp.runtime.outcome.StepResult(None)], "result 0 has no loss")):
        with pytest.raises(ValueError, match=text if text != "nothing" else "no batch with anything"):
            pp.mean_loss(bad)


def test_an_epoch_with_a_half_and_a_single_row_trains_to_the_end() -> None:  # UR-059
    case = CASES["fan_out"]
    model, plain = case.model(), case.model()
    pipe = make(case, model)
    for rows in (8, 8, 8, 4, 1):
        inputs, targets = rows_of(case, rows)
        result = pipe.step(*inputs, targets=targets)
        assert apart(pipe, result, plain, *plain_uneven(case, plain, rows, 4)) == [], rows


def test_training_evaluating_a_smaller_batch_and_training_again() -> None:  # UR-058, UR-087, UR-089
    case = CASES["chain"]
    model, plain = case.model(), case.model()
    pipe = make(case, model)
    for rows, train in ((2, False), (8, True), (2, False), (8, True), (3, False), (5, True)):
        inputs, targets = rows_of(case, rows)
        if train:
            result = pipe.step(*inputs, targets=targets, outputs="all")
            assert apart(pipe, result, plain, *plain_uneven(case, plain, rows, 4)) == []
        else:
            loss = pipe.evaluate(*inputs, targets=targets).loss
            with torch.no_grad():
                expected = functional.mse_loss(plain(*inputs), *targets)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


@given(st.sampled_from([s for s in SCHEDULES if s != "auto"]), st.integers(1, 9), st.integers(1, 9), st.integers(2, 4))
def test_a_schedule_without_its_last_micro_batches_stays_legal(name: str, full: int, kept: int, stages: int) -> None:
    graph = chain_graph(stages)
    try:
        schedule = build_schedule(name, graph, tuple(range(stages)), full)
    except pp.ScheduleError:
        return
    fewer = first_microbatches(schedule, min(kept, full))
    assert verify_schedule(fewer, graph) == ()
    assert fewer.microbatches == min(kept, full)


def test_pairs_that_may_overlap_stay_pairs() -> None:
    actions = [pp.schedule.action.parse_action(text) for text in ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2")]
    schedule = Schedule("own", (tuple(actions),), (0,), 3, overlaps=((1, 3),))
    fewer = first_microbatches(schedule, 2)
    assert [str(action) for action in fewer.rows[0]] == ["0F0", "0F1", "0B0", "0B1"]
    assert fewer.overlaps == ((1,),)


def test_rows_are_counted_out_in_turn() -> None:
    for rows in range(1, 20):
        for microbatches in range(1, 8):
            assert tuple(sizes_of(rows, microbatches)) == near_equal(rows, min(rows, microbatches))
