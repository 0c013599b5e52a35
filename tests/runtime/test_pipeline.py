from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import ppdsl as pp
from ppdsl.schedule.registry import build_schedule
from tests.runtime.models import CASES, Base, batch_of, first, pipeline_of, plain_step


def refusal(run: object) -> str:
    with pytest.raises(pp.PpdslError) as caught:
        run()
    return str(caught.value)


def test_evaluate_gives_the_loss_and_leaves_no_gradient_and_no_mode_behind() -> None:
    case = CASES["norm"]
    model, reference = case.model(), case.model()
    pipe = pipeline_of(case, model)
    inputs, targets = batch_of(case)
    for training in (True, False, True):
        model.train(training)
        reference.train(training)
        with torch.no_grad():
            loss = sum(case.loss(reference(inputs[0][i : i + 2]), targets[0][i : i + 2]) * 0.25 for i in (0, 2, 4, 6))
        assert torch.equal(pipe.evaluate(*inputs, targets=targets).loss, loss)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert model.training is training
        for (name, buffer), other in zip(model.named_buffers(), reference.buffers(), strict=True):
            assert torch.equal(buffer, other), name


def test_training_and_evaluation_in_any_order_do_not_disturb_each_other() -> None:
    case = CASES["fan_out"]
    model = case.model()
    pipe = pipeline_of(case, model)
    inputs, targets = batch_of(case)
    losses = []
    for mode in ("evaluate", "step", "call", "step", "no_grad", "step", "evaluate"):
        if mode == "call":
            pipe(*inputs)
        elif mode == "no_grad":
            with torch.no_grad():
                losses.append(pipe.step(*inputs, targets=targets).loss)
        else:
            losses.append(getattr(pipe, mode)(*inputs, targets=targets).loss)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    reference = case.model()
    for _ in range(3):
        plain_step(case, reference)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a_step_under_no_grad_has_no_backward() -> None:
    case = CASES["chain"]
    model = case.model()
    pipe = pipeline_of(case, model)
    inputs, targets = batch_of(case)
    with torch.no_grad():
        result = pipe.step(*inputs, targets=targets, timeline=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {event.action.kind for event in result.timeline.events} == {"F"}


def test_calling_the_pipeline_gives_the_models_own_output() -> None:
    case = CASES["dict_output"]
    model = case.model()
    pipe = pipeline_of(case, model)
    inputs, _ = batch_of(case)
    output = pipe(*inputs)
    with torch.no_grad():
        expected = [model(inputs[0][i : i + 2]) for i in (0, 2, 4, 6)]
    assert list(output) == ["logits", "hidden", "none"]
    assert output["none"] is None
    assert torch.equal(output["logits"], torch.cat([e["logits"] for e in expected]))
    assert torch.equal(output["hidden"][1], torch.cat([e["hidden"][1] for e in expected]))
    assert not output["logits"].requires_grad


def test_a_model_that_returns_its_loss_needs_no_loss_function() -> None:
    case = CASES["own_loss"]
    pipe = pipeline_of(case, case.model())
    inputs, _ = batch_of(case)
    result = pipe.step(*inputs, outputs="all")
    loss, outputs = plain_step(case, case.model())
    assert torch.equal(result.loss, loss)
    assert torch.equal(result.outputs["loss"], loss)
    assert torch.equal(result.outputs["logits"], torch.cat([o["logits"] for o in outputs]).detach())


def test_the_loss_is_recorded_at_the_first_step_when_there_are_no_example_targets() -> None:
    case = CASES["chain"]
    inputs, targets = batch_of(case)
    pipe = pp.pipeline(case.model(), first(inputs), loss=case.loss, microbatches=4)
    assert pipe.graph.loss is None
    assert torch.equal(pipe.step(*inputs, targets=targets).loss, plain_step(case, case.model())[0])
    assert pipe.graph.loss == 2
    assert "2B0" in str(pipe.schedule)


def test_targets_that_do_not_fit_the_loss_are_not_remembered() -> None:
    case = CASES["chain"]
    inputs, targets = batch_of(case)
    pipe = pp.pipeline(case.model(), first(inputs), loss=case.loss, microbatches=4)
    assert "error[wrong-targets]" in refusal(lambda: pipe.step(*inputs))
    assert torch.equal(pipe.step(*inputs, targets=targets).loss, plain_step(case, case.model())[0])


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 0.25), ("sum", 1.0), (lambda part, whole: 0.5, 0.5)])
def test_the_reduction_is_the_weight_of_each_micro_batch(reduction: object, factor: float) -> None:
    case = CASES["chain"]
    model, reference = case.model(), case.model()
    inputs, targets = batch_of(case)
    result = pipeline_of(case, model, reduction=reduction).step(*inputs, targets=targets)
    assert result.loss.item() == pytest.approx(sum(result.losses) * factor, rel=1e-12)
    plain_step(case, reference)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad * 4 * factor, rtol=1e-12, atol=1e-12)


def test_tokens_are_weighed_by_a_function_of_the_batch() -> None:
    model = CASES["chain"].model()
    reference = CASES["chain"].model()
    torch.manual_seed(3)
    x, labels = torch.randn(8, 4).double(), torch.tensor([0, 1, -100, -100, -100, 2, 3, 1])

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, ignore_index=-100, reduction="sum")

    def weight(part: object, whole: dict[str, torch.Tensor]) -> float:
        return 1.0 / (whole["targets[0]"] != -100).sum().item()

    pipe = pp.pipeline(model, (x[:2],), targets=labels[:2], loss=loss, microbatches=4, reduction=weight)
    result = pipe.step(x, targets=labels)
    expected = functional.cross_entropy(reference(x), labels, ignore_index=-100)
    expected.backward()
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a_loss_that_is_not_finite_is_a_warning_with_stage_and_micro_batch() -> None:
    case = CASES["chain"]
    inputs, targets = batch_of(case)
    inputs[0][4] = float("nan")
    targets[0][0] = float("inf")
    pipe = pipeline_of(case, case.model())
    with pytest.warns(pp.PpdslWarning) as caught:
        result = pipe.step(*inputs, targets=targets)
    assert str(caught[0].message) == (
        "warning[loss-not-finite]: The loss, computed in stage 2, is inf in micro-batch 0 and nan in micro-batch 2."
    )
    assert result.loss.isnan()


def test_modes_and_frozen_parameters_may_change_between_steps() -> None:
    class Dropping(Base):
        def forward(self, x):
            with pp.stage(0):
                h = functional.dropout(self.a(x), 1.0, self.training)
            with pp.stage(1):
                return self.b(h)

    case = CASES["chain"]
    model = Dropping().double()
    inputs, targets = batch_of(case)
    pipe = pipeline_of(case, model)
    torch.nn.init.zeros_(model.b.bias)
    assert pipe(*inputs).abs().sum() == 0
    model.eval()
    assert pipe(*inputs).abs().sum() > 0
    model.a.requires_grad_(False)
    pipe.step(*inputs, targets=targets)
    assert model.a.weight.grad is None
    model.a.requires_grad_(True)
    pipe.step(*inputs, targets=targets)
    assert model.a.weight.grad is not None


def test_a_given_schedule_places_stages_and_counts_micro_batches() -> None:
    case = CASES["chain"]
    graph = pipeline_of(case, case.model()).graph
    schedule = build_schedule("gpipe", graph, (0, 1, 0), 4)
    inputs, targets = batch_of(case)
    pipe = pp.pipeline(case.model(), first(inputs), targets=first(targets), loss=case.loss, schedule=schedule)
    assert pipe.schedule == schedule
    assert torch.equal(pipe.step(*inputs, targets=targets).loss, plain_step(case, case.model())[0])
    assert pipe(*inputs).shape == (8, 4)
    assert repr(pipe) == "Pipeline(Chain: 3 stages on 2 ranks, gpipe, 4 micro-batches)"


def test_state_goes_out_and_in_under_the_models_own_names() -> None:
    case = CASES["norm"]
    model, other = case.model(), case.model()
    pipe, twin = pipeline_of(case, model), pipeline_of(case, other)
    inputs, targets = batch_of(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    pipe.step(*inputs, targets=targets)
    assert list(pipe.state_dict()) == list(model.state_dict())
    twin.load_state_dict(pipe.state_dict())
    assert all(
        torch.equal(one, two) for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    state = pipe.state_dict()
    state["z"] = state.pop("a.bias")
    assert refusal(lambda: twin.load_state_dict(state)) == (
        "error[missing-state]: The state has no `a.bias`, which this rank needs.\n\n"
        "error[unknown-state]: The model has no `z`."
    )
    twin.load_state_dict(state, strict=False)
    assert list(pipe.full_state_dict()) == list(model.state_dict())


def test_a_measured_timeline_has_every_computation_once() -> None:
    case = CASES["chain"]
    pipe = pipeline_of(case, case.model())
    inputs, targets = batch_of(case)
    assert pipe.step(*inputs, targets=targets).timeline is None
    assert pipe.timeline() is None
    timeline = pipe.step(*inputs, targets=targets, timeline=True).timeline
    assert timeline is not None
    assert timeline.measured
    assert timeline.stage_labels == ("0", "1", "2")
    assert sorted(str(e.action) for e in timeline.events) == sorted(str(a) for row in pipe.schedule.rows for a in row)
    for rank in range(3):
        events = [event for event in timeline.events if event.rank == rank]
        assert [str(event.action) for event in events] == [str(action) for action in pipe.schedule.rows[rank]]
        assert all(0 <= one.start <= one.end <= two.start for one, two in itertools.pairwise(events))
    assert pipe.timeline() is timeline


def test_explain_is_plain_data_about_stages_ranks_edges_and_ties() -> None:
    pipe = pipeline_of(CASES["tied"], CASES["tied"].model())
    told = pipe.explain()
    assert [stage["rank"] for stage in told["stages"]] == [0, 1, 2]
    assert told["ties"] == [{"names": ["w"], "stages": [0, 1, 2]}]
    assert told["schedule"]["name"] == "1f1b"
    assert [(edge["producer"], edge["consumers"], edge["messages"]) for edge in told["edges"]] == [
        (0, [1], 4),
        (1, [2], 4),
    ]
    assert told["bytes_per_step"] == 4 * 2 * 2 * 64


BAD_CHOICES = {
    "unreadable-spec": (
        {"spec": "net.ppspec"},
        "error[unreadable-spec]: net.ppspec cannot be read: no such file or directory.\n"
        "help: give the path of a .ppspec file",
    ),
    "no-spec": (
        {"spec": 3},
        "error[no-spec]: spec= is neither a path nor a partition, but 3.\nhelp: give the path of a .ppspec file",
    ),
    "unknown-reduction": (
        {"reduction": "median"},
        "error[unknown-reduction]: There is no reduction 'median'.\n"
        "help: one of: mean, sum, token_mean, or a function that returns a micro-batch's weight",
    ),
    "no-microbatches": (
        {"microbatches": 0},
        "error[no-microbatches]: A step of 0 micro-batches has nothing to run.\nhelp: use at least 1 micro-batch",
    ),
    "wrong-timeout": ({"timeout": 0}, "error[wrong-timeout]: timeout is 0 seconds.\nhelp: give more than 0"),
    "unknown-runtime": (
        {"runtime": "mpi"},
        "error[unknown-runtime]: There is no runtime 'mpi'.\nhelp: one of: inprocess, distributed, xla",
    ),
    "not-initialised": (
        {"runtime": "distributed"},
        "error[not-initialised]: torch.distributed is not initialised.\n"
        "help: call torch.distributed.init_process_group() first, under torchrun",
    ),
    "unknown-input": (
        {"batch_axis": {"y": 0}},
        "error[unknown-input]: batch_axis names `y`, which is no input or output.\nhelp: one of: x, output",
    ),
}


@pytest.mark.parametrize("code", BAD_CHOICES)
def test_a_bad_choice_is_one_clear_error(code: str) -> None:
    case = CASES["chain"]
    options, text = BAD_CHOICES[code]
    inputs, _ = batch_of(case)
    assert refusal(lambda: pp.pipeline(case.model(), first(inputs), **options)) == text


def test_a_call_that_does_not_fit_is_refused_and_the_next_one_runs() -> None:
    case = CASES["chain"]
    pipe = pipeline_of(case, case.model())
    inputs, targets = batch_of(case)
    assert "error[wrong-arguments]" in refusal(lambda: pipe.step(*inputs, *inputs, targets=targets))
    assert "error[wrong-arguments]" in refusal(lambda: pipe.step(targets=targets))
    assert "error[wrong-structure]" in refusal(lambda: pipe.step(*inputs))
    assert refusal(lambda: pipe.step(*inputs, targets=targets, outputs="some")) == (
        "error[unknown-outputs]: outputs is 'some'.\nhelp: one of: none, last, all"
    )
    assert torch.equal(pipe.step(*inputs, targets=targets).loss, plain_step(case, case.model())[0])


def test_training_without_a_loss_is_refused() -> None:
    case = CASES["chain"]
    inputs, _ = batch_of(case)
    pipe = pp.pipeline(case.model(), first(inputs), microbatches=4)
    assert refusal(lambda: pipe.step(*inputs)) == (
        "error[no-loss]: There is no loss to train with: forward returns none, and the pipeline was built without "
        "loss=.\nhelp: give loss=, or let forward return a scalar"
    )
    assert pipe.evaluate(*inputs).loss is None


def test_parameters_on_meta_are_refused_at_the_step_and_not_before() -> None:
    case = CASES["chain"]
    model = case.model()
    inputs, targets = batch_of(case)
    state = model.state_dict()
    hollow = Base().double().to("meta")
    hollow.__class__ = type(model)
    pipe = pipeline_of(case, hollow)
    assert refusal(lambda: pipe.step(*inputs, targets=targets)) == (
        "error[meta-parameter]: Parameter `a.weight` of this rank's stages is on meta: it has no values.\n"
        "help: fill it before the first step, for example with model.to_empty() and load_state_dict()"
    )
    hollow.to_empty(device="cpu")
    pipe.load_state_dict(state)
    assert torch.equal(pipe.step(*inputs, targets=targets).loss, plain_step(case, case.model())[0])


def test_a_parameter_that_was_replaced_trains_in_the_place_of_the_old_one() -> None:
    case = CASES["tied"]
    model, reference = case.model(), case.model()
    pipe = pipeline_of(case, model)
    inputs, targets = batch_of(case)
    pipe.step(*inputs, targets=targets)
    for net in (model, reference):
        net.w = nn.Parameter(net.w.detach() * 2)
        net.zero_grad()
    result = pipe.step(*inputs, targets=targets)
    loss, _ = plain_step(case, reference)
    assert torch.equal(result.loss, loss)
    torch.testing.assert_close(model.w.grad, reference.w.grad, rtol=1e-12, atol=1e-12)
    assert model.w in set(pipe.parameters())


def test_dropping_a_hint_about_the_batch_axis_is_not_needed_for_a_sequence_first_model() -> None:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.RNN(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            with pp.stage(0):
                h, _ = self.a(x)
            with pp.stage(1):
                return self.b(h)

    torch.manual_seed(0)
    model = SequenceFirst().double()
    x, y = torch.randn(5, 8, 4).double(), torch.randn(5, 8, 3).double()
    pipe = pp.pipeline(model, (x[:, :2],), targets=y[:, :2], loss=functional.mse_loss, microbatches=4)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), model(x), rtol=1e-12, atol=1e-12)
        expected = functional.mse_loss(model(x), y)
    torch.testing.assert_close(pipe.step(x, targets=y).loss, expected, rtol=1e-12, atol=1e-12)
