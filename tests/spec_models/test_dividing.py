"""Recordings that are divided from outside: stages of calls and steps, given to a tape in place of marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ppdsl.diagnostics import RecordingError
from ppdsl.graph.outline import ModelOutline
from ppdsl.recording.record import Recording, record_call
from tests.recording.harness import differences, loss_of, on_meta, run_plain, run_split, shape_of
from tests.spec_models.hand import by_module
from tests.spec_models.nets import (
    Annotated,
    Branches,
    Chain,
    Rotated,
    Skip,
    Steered,
    TiedChain,
    Twice,
    made,
    tokens,
    vectors,
)

CASES: dict[str, tuple[type[nn.Module], Tensor, dict[str, Any], str, str]] = {
    "chain": (
        Chain, tokens(), {"embed": "in", "h.0": "in", "h.1": 1, "h.2": 1, "h.3": 2, "norm": 2, "head": 2},
        "in 1 2", "1>2 in>1",
    ),
    "tied": (
        TiedChain, tokens(), {"embed": 0, "h.0": 0, "h.1": 0, "h.2": 1, "h.3": 1, "norm": 1, "head": 1},
        "0 1", "0>1",
    ),
    "branches": (
        Branches, vectors(), {"stem": "stem", "left": "left", "right": "right", "join": "join"},
        "stem left right join", "left>join right>join stem>left,right",
    ),
    "skip": (
        Skip, vectors(), {"down": "down", "middle": "middle", "up": "up"},
        "down middle up", "down>middle middle>up",  # what joins them is made in the later one
    ),
    "twice": (
        Twice, vectors(), {"first": 0, "block#0": 0, "block#1": 1, "last": 1},
        "0 1", "0>1",
    ),
    "inside a block": (
        Chain, tokens(),
        {"embed": 0, "h.0": 0, "h.1": 0, "h.2.up": 0, "h.2.down": 1, "h.3": 1, "norm": 1, "head": 1},
        "0 1", "0>1 0>1",
    ),
}  # fmt: skip


def check_equal(recording: Recording, model: nn.Module, twin: nn.Module, example: Tensor) -> None:
    calls = [((example,), {})]
    assert recording.model is model
    wrong, _ = differences(run_split(recording, calls, with_loss=True), run_plain(twin, calls, loss_of))
    assert not wrong


@pytest.mark.parametrize("name", CASES)
def test_a_divided_model_has_the_stages_and_the_numbers_of_the_unsplit_one(name: str) -> None:
    kind, example, stages, labels, edges = CASES[name]
    model = made(kind)
    recording = record_call(model, (example,), loss=loss_of, spec=by_module(stages))
    assert shape_of(recording) == (labels, edges)
    check_equal(recording, model, made(kind), example)


@pytest.mark.parametrize("name", CASES)
def test_parameters_without_memory_give_the_same_recording(name: str) -> None:
    kind, example, stages, _, _ = CASES[name]
    real = record_call(made(kind), (example,), spec=by_module(stages))
    bare = record_call(on_meta(made(kind)), (example,), spec=by_module(stages))
    assert bare.digest == real.digest


def test_stages_know_where_they_are_declared() -> None:
    recording = record_call(made(Skip), (vectors(),), spec=by_module({"down": "a", "middle": "b", "up": "b"}))
    assert [str(stage.span) for stage in recording.graph.stages] == ["net.ppspec:1:1", "net.ppspec:2:1"]


def test_the_digest_depends_on_the_division() -> None:
    model, given = made(Skip), (vectors(),)
    one = record_call(model, given, spec=by_module({"down": 0, "middle": 1, "up": 1})).digest
    two = record_call(model, given, spec=by_module({"down": 0, "middle": 0, "up": 1})).digest
    assert one != two
    assert one == record_call(model, given, spec=by_module({"down": 0, "middle": 1, "up": 1})).digest


def test_replicated_tables_run_in_every_stage_that_needs_them() -> None:
    stages: dict[str, Any] = {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 2, "head": 2}
    model = made(Rotated)
    sent = record_call(model, (tokens(),), loss=loss_of, spec=by_module({**stages, "rotary": 0}))
    assert shape_of(sent)[1] == "0>1 0>1,2 0>1,2 1>2"
    again = record_call(model, (tokens(),), loss=loss_of, spec=by_module(stages, repeated=("rotary",)))
    assert shape_of(again) == ("0 1 2", "0>1 1>2")
    assert [stage.buffers for stage in again.graph.stages] == [("rotary.frequency",)] * 3
    check_equal(again, model, made(Rotated), tokens())


def test_a_module_with_parameters_cannot_be_replicated() -> None:
    stages = by_module({"embed": 0, "layers": 0, "head": 1}, repeated=("layers.0",))
    with pytest.raises(RecordingError) as caught:
        record_call(made(Rotated), (tokens(),), spec=stages)
    (finding,) = caught.value.diagnostics
    assert finding.code == "not-replicable"
    assert finding.message.startswith("Module `layers.0` cannot run in every stage that needs it, because ")


def test_marks_in_the_code_have_no_effect_and_are_mentioned_once() -> None:
    seen: list[ModelOutline] = []
    stages = by_module({"a": "x", "b": "y", "c": "y"}, seen=seen)
    recording = record_call(made(Annotated), (vectors(),), spec=stages)
    assert [stage.key for stage in recording.graph.stages] == ["x", "y"]
    (warning,) = recording.graph.warnings
    assert (warning.code, warning.message) == (
        "marks-ignored",
        "The spec divides the model, so 2 stage marks in its code had no effect.",
    )
    (cut,) = seen[0].cutpoints
    assert (cut.name, cut.optional, seen[0].steps[cut.step].name) == ("middle", True, "tanh")


def test_a_call_that_numbers_steer_stays_whole() -> None:
    stages: dict[str, Any] = {"inner": 0, "last": 1}
    recording = record_call(made(Steered), (vectors(),), spec=by_module(stages))
    assert [stage.modules for stage in recording.graph.stages] == [("inner",), ("last",)]


class Counting(nn.Module):
    """Python counts calls and decides what runs between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.count = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.a(x)
        return self.b(x * self.count)


def test_what_python_counts_between_divided_modules_is_refused() -> None:
    with pytest.raises(RecordingError, match="Two recordings of the same micro-batch differ"):
        record_call(made(Counting), (vectors(),), spec=by_module({"a": 0, "b": 1}))


class Messenger(nn.Module):
    """The first module writes a number on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Told()
        self.a = Telling([self.b])

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Telling(nn.Module):
    def __init__(self, others: list[nn.Module]) -> None:
        super().__init__()
        self.linear, self.others = nn.Linear(8, 8), others

    def forward(self, x: Tensor) -> Tensor:
        self.others[0].scale = float(x.shape[0])
        return self.linear(x)


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_a_number_that_one_stage_writes_and_another_reads_is_mentioned() -> None:
    recording = record_call(made(Messenger), (vectors(),), spec=by_module({"a": "a", "b": "b"}))
    assert [warning.message for warning in recording.graph.warnings] == [
        "Stage a writes attribute `scale` of a module of stage b: Python values do not travel between ranks."
    ]


def test_outlines_have_one_step_for_each_torch_call() -> None:
    seen: list[ModelOutline] = []
    record_call(made(Chain), (tokens(),), spec=by_module({"": 0}, seen=seen))
    outline = seen[0]
    assert [call.module for call in outline.calls][:4] == ["", "embed", "h.0", "h.0.up"]
    assert [step.name for step in outline.steps][:4] == ["embedding", "linear", "tanh", "linear"]
    head = outline.steps[-1]
    assert (head.parameters, head.flops, head.bytes) == (("head.weight",), 2 * 10 * 8 * 11, 2 * 5 * 11 * 8)
    assert head.needs == (len(outline.steps) - 2,)
    assert outline.modules[0].types == ("Chain",)
    assert sum(parameter.count for parameter in outline.parameters) == sum(
        parameter.numel() for parameter in made(Chain).parameters()
    )


def test_outlines_know_tied_parameters_under_all_names() -> None:
    seen: list[ModelOutline] = []
    record_call(made(TiedChain), (tokens(),), spec=by_module({"": 0}, seen=seen))
    assert seen[0].parameters[0].names == ("embed.weight", "head.weight")
    assert seen[0].steps[-1].parameters == ("embed.weight",)


def test_checkpointed_calls_are_looked_through() -> None:
    class Saving(Chain):
        def forward(self, given: Tensor) -> Tensor:
            x = self.embed(given)
            for block in self.h:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    stages: dict[str, Any] = {"embed": 0, "h.0": 0, "h.1": 0, "h.2": 1, "h.3": 1, "norm": 1, "head": 1}
    model = made(Saving)
    recording = record_call(model, (tokens(),), loss=loss_of, spec=by_module(stages))
    assert shape_of(recording) == ("0 1", "0>1")
    check_equal(recording, model, made(Saving), tokens())
