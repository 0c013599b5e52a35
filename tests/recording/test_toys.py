"""Every toy: equal to the plain model, or the named error; nothing in between."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

import ppdsl as pp
from ppdsl.diagnostics import RecordingError
from ppdsl.recording.record import record_call
from tests.recording.harness import SEEDS, build, call_of, judge, mark, neutral, on_meta, shape_of
from tests.recording.toys import TOYS
from tests.recording.toys.base import Outcome, Toy
from tests.recording.toys.errors import error_of_violation, expected_errors

EQUAL_ENOUGH = {
    Outcome.EQUAL: {Outcome.EQUAL},
    Outcome.SUM_ORDER: {Outcome.EQUAL, Outcome.SUM_ORDER},
    Outcome.REFUSED: {Outcome.REFUSED},
}
ALL = pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
RECORDED = [toy for toy in TOYS.values() if toy.outcome is not Outcome.REFUSED]
GUARDED = [toy for toy in RECORDED if toy.violates is not None]
ERRORS = expected_errors()
CANNOT_BE_ON_META = {
    "script_module_is_one_call": "the scripted parameters cannot be replaced",
    "functional_call_of_a_module": "torch checks the parameters it is given against the module's own",
}


@ALL
@pytest.mark.parametrize("with_loss", [False, True], ids=["outputs", "loss"])
def test_a_split_toy_does_what_the_plain_one_does(toy: Toy, with_loss: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = judge(toy, with_loss=with_loss)

    # The loss of a SUM_ORDER toy, or of one with outputs in several stages, adds consumers to what it weighs.
    expected = toy.outcome_with_loss if with_loss and toy.outcome_with_loss else toy.outcome
    assert verdict.outcome in EQUAL_ENOUGH[expected], f"{verdict.outcome}: {verdict.text}"
    if verdict.recording is None:
        assert neutral(verdict.text) == ERRORS[toy.name]
        return
    graph = verdict.recording.graph
    assert set(toy.warns) <= {warning.code for warning in graph.warnings}
    if not with_loss:
        stages, edges = shape_of(verdict.recording)
        assert toy.stages in (None, stages)
        assert toy.edges in (None, edges)
    else:
        assert graph.loss is not None
        assert sum(result.loss for program in verdict.recording.programs for result in program.results) == 1


@pytest.mark.parametrize("toy", GUARDED, ids=[toy.name for toy in GUARDED])
def test_a_micro_batch_that_the_recording_does_not_hold_for_is_refused(toy: Toy) -> None:
    assert error_of_violation(toy) == ERRORS[toy.name]


@pytest.mark.parametrize("toy", RECORDED, ids=[toy.name for toy in RECORDED])
def test_programs_hold_the_users_own_parameters(toy: Toy) -> None:
    model = build(toy)
    mark(model)
    own = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    recording = record_call(model, *call_of(toy, SEEDS[0]))

    for program in recording.programs:
        for name, parameter in program.parameters:
            assert own.get(name, id(parameter)) == id(parameter)
    used = {id(parameter) for program in recording.programs for _, parameter in program.parameters}
    for tie in recording.graph.ties:
        assert len({own[name] for name in tie.names}) == 1
        assert own[tie.names[0]] in used


@pytest.mark.parametrize("toy", RECORDED, ids=[toy.name for toy in RECORDED])
def test_two_recordings_agree(toy: Toy) -> None:
    digests = set()
    for _ in range(2):
        model = build(toy)
        mark(model)
        digests.add(record_call(model, *call_of(toy, SEEDS[0])).digest)
    assert len(digests) == 1


META = [toy for toy in RECORDED if toy.name not in CANNOT_BE_ON_META]


@pytest.mark.parametrize("toy", META, ids=[toy.name for toy in META])
def test_parameters_on_meta_give_the_same_graph(toy: Toy) -> None:
    graphs = []
    for model in (build(toy), on_meta(build(toy))):
        mark(model)
        graphs.append(record_call(model, *call_of(toy, SEEDS[0])).graph)
    assert graphs[0] == graphs[1]


class RaisesMidway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise LookupError(f"the user's own error after {tuple(self.inner(x).shape)}")


def test_an_error_of_the_users_own_comes_through_as_it_is() -> None:
    with pytest.raises(LookupError, match=r"the user's own error after \(4, 4\)"):
        record_call(RaisesMidway(), (torch.randn(4, 4),), {})


def test_every_row_of_the_design_page_has_a_toy() -> None:
    rows = {row for toy in TOYS.values() for row in toy.rows}
    # 3.26 (ties after a move to another device) is about the XLA runtime, not the recorder.
    wanted = {f"3.{row}" for row in range(1, 32)} - {"3.26"} | {f"6.{row}" for row in range(1, 13)} | {"4"}
    assert wanted <= rows


def test_strict_refuses_operations_outside_every_stage() -> None:
    toy = TOYS["glue_between_blocks"]
    with pytest.raises(RecordingError) as caught:
        record_call(build(toy), *call_of(toy, SEEDS[0]), strict=True)
    assert neutral(str(caught.value)).splitlines() == [
        "error[unmarked-operation]: `mul` runs outside every stage.",
        " --> marks.py",
        " |",
        " | h = (h * 2).relu()",
        " | ^^^^^",
        "help: put it into a `with pp.stage(...)` block, or record without strict=True",
    ]


def test_another_thread_is_not_heard() -> None:
    toy = TOYS["two_blocks"]
    other, stop = nn.Linear(4, 4), threading.Event()
    calls = 0

    def call_modules() -> None:
        nonlocal calls
        while not stop.is_set():
            with pp.stage("elsewhere"):
                other(torch.zeros(2, 4))
            calls += 1

    thread = threading.Thread(target=call_modules)
    thread.start()
    try:
        graphs = [record_call(build(toy), *call_of(toy, SEEDS[0])).graph for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    assert calls
    assert all(graph == graphs[0] for graph in graphs)
    assert [stage.modules for stage in graphs[0].stages] == [("a",), ("b",)]
