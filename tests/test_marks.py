"""Marks: no-ops outside a recording, listed, shown, undone; and the whole text of every error about them."""

from __future__ import annotations

import copy
import pickle
import threading
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ppdsl as pp
from ppdsl import annotate
from ppdsl.annotate import Key
from ppdsl.recording.record import record_call
from ppdsl.source import Place
from tests.recording.harness import neutral

MIXED = (
    "error[mixed-marks]: Cutpoints number the stages themselves, "
    "so they cannot be mixed with stages that are named by a key."
)


class Ear:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def enter_stage(self, key: Key, place: Place) -> None:
        self.heard.append(f"enter {key!r}")

    def exit_stage(self) -> None:
        self.heard.append("exit")

    def pass_cutpoint(self, name: str | None, optional: bool, place: Place) -> None:
        self.heard.append(f"cut {name} {'optional ' if optional else ''}in line {place.span.line}")


class Net(nn.Module):
    """Three layers; `forward` is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        if self.run is not None:
            return self.run(self, x)
        return self.c(self.b(self.a(x)))


def text(*lines: str) -> str:
    return "\n".join(lines)


def text_of(error: pytest.ExceptionInfo[pp.PpdslError]) -> str:
    return neutral(str(error.value))


def refusal(model: nn.Module) -> str:
    """Record a model that is refused, and return the error's whole text."""
    with pytest.raises(pp.MarkError) as caught:
        record_call(model, (torch.randn(4, 4),), {})
    return text_of(caught)


# -- outside a recording -------------------------------------------------------------------------------------


def test_marks_do_nothing_outside_a_recording() -> None:
    value = {"a": [1, 2]}
    assert pp.cutpoint(value) is value
    assert pp.cutpoint(value, name="x", optional=True) is value
    with pp.stage(0) as mark:
        assert repr(mark) == "stage(0)"
    assert pp.stage("k")(len)("abc") == 3


def test_a_block_lets_exceptions_through() -> None:
    with pytest.raises(KeyError), pp.stage(0):
        raise KeyError


def test_a_decorated_function_keeps_its_name_and_signature() -> None:
    @pp.stage(1)
    def head(x: int, *, y: int = 2) -> int:
        """Add."""
        return x + y

    assert (head.__name__, head.__doc__, head(1, y=5)) == ("head", "Add.", 6)


def test_a_block_that_is_a_no_op_takes_less_than_a_microsecond() -> None:
    def block() -> None:
        with pp.stage(0):
            pass

    assert min(timeit.repeat(block, number=10_000, repeat=20)) / 10_000 < 1e-6


def test_a_cutpoint_that_is_a_no_op_takes_less_than_a_microsecond() -> None:
    assert min(timeit.repeat(lambda: pp.cutpoint(1), number=10_000, repeat=20)) / 10_000 < 1e-6


# -- heard by a recording ------------------------------------------------------------------------------------


def test_a_listener_hears_blocks_and_cuts_in_order() -> None:
    ear = Ear()
    with annotate.listen(ear):
        with pp.stage(0), pp.stage("in"):
            pass
        pp.cutpoint(None, name="x", optional=True)
    line = test_a_listener_hears_blocks_and_cuts_in_order.__code__.co_firstlineno + 5
    assert ear.heard == ["enter 0", "enter 'in'", "exit", "exit", f"cut x optional in line {line}"]


def test_a_listener_hears_the_end_of_a_block_that_raises() -> None:
    ear = Ear()
    with annotate.listen(ear):
        try:
            with pp.stage(0):
                raise KeyError
        except KeyError:
            pass
    assert ear.heard == ["enter 0", "exit"]


def test_a_listener_hears_its_own_thread_only() -> None:
    ear = Ear()
    with annotate.listen(ear):
        thread = threading.Thread(target=lambda: pp.cutpoint(1))
        thread.start()
        thread.join()
    assert ear.heard == []


def test_a_listener_is_forgotten_at_the_end_and_the_outer_one_heard_again() -> None:
    outer, inner = Ear(), Ear()
    with annotate.listen(outer):
        with annotate.listen(inner):
            pp.stage(0).__enter__()
        pp.stage(1).__enter__()
    pp.stage(2).__enter__()
    assert (outer.heard, inner.heard) == (["enter 1"], ["enter 0"])


# -- laid from outside ---------------------------------------------------------------------------------------


def test_marks_lists_what_was_laid_and_unmark_undoes_it() -> None:
    model = Net()
    plain = repr(model)
    pp.begin(model.b, 1)
    pp.place(model.c, "head", call=0)

    assert [(mark.module, str(mark)) for mark in pp.marks(model)] == [("b", "begin(1)"), ("c", "place('head', call=0)")]
    assert "(b): Linear(in_features=4, out_features=4, bias=True, pp.begin(1))" in repr(model)
    pp.unmark(model)
    assert (pp.marks(model), repr(model)) == ((), plain)
    assert "forward" not in vars(model.b)


def test_a_mark_laid_again_replaces_the_old_one() -> None:
    model = Net()
    pp.begin(model.b, 1)
    pp.begin(model.b, 2)
    assert [str(mark) for mark in pp.marks(model)] == ["begin(2)"]


def test_laid_marks_are_copied_and_pickled_with_the_model_and_are_no_part_of_its_state() -> None:
    model = Net()
    names = list(model.state_dict())
    pp.begin(model.b, 1)

    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [str(mark) for mark in pp.marks(twin)] == ["begin(1)"]
        pp.unmark(twin)
        assert repr(twin) == repr(Net())
    assert [str(mark) for mark in pp.marks(model)] == ["begin(1)"]
    assert list(model.state_dict()) == names


def test_laid_marks_change_nothing_of_what_the_model_computes() -> None:
    model, x = Net(), torch.randn(4, 4)
    expected = model(x)
    pp.begin(model.b, 1)
    pp.place(model.c, 2)
    assert torch.equal(model(x), expected)


def test_one_call_of_a_module_is_begun_by_its_number() -> None:
    model = Net(lambda self, x: self.a(self.a(self.a(x))))
    pp.begin(model.a, 1, call=2)
    graph = record_call(model, (torch.randn(4, 4),), {}).graph
    assert [stage.modules for stage in graph.stages] == [("a", "a"), ("a",)]


# -- errors --------------------------------------------------------------------------------------------------


def test_a_key_is_an_int_or_a_str() -> None:
    with pytest.raises(pp.MarkError) as caught, pp.stage(1.5):  # type: ignore[arg-type]
        pass
    assert text_of(caught) == text(
        "error[bad-key]: A stage is marked with an int or a str, not with 1.5.",
        " --> test_marks.py",
        " |",
        " | with pytest.raises(pp.MarkError) as caught, pp.stage(1.5):  # type: ignore[arg-type]",
        " | ^^^^^^^^^^^^^",
        "help: for a computed number write `int(...)` around it",
    )
    with pytest.raises(pp.MarkError):
        pp.stage(True)
    with pytest.raises(pp.MarkError):
        pp.begin(nn.Linear(1, 1), None)  # type: ignore[arg-type]


def test_a_mark_is_laid_on_a_module() -> None:
    with pytest.raises(pp.MarkError) as caught:
        pp.begin(len, 1)
    assert text_of(caught) == text(
        "error[no-module]: A begin mark is laid on a torch.nn.Module, not on a builtin_function_or_method.",
        " --> test_marks.py",
        " |",
        " | pp.begin(len, 1)",
        " | ^^^^^^^^^^^^^^^^",
        "help: inside forward, write `with pp.stage(key):`",
    )


def test_a_marked_module_must_be_called() -> None:
    model = Net()
    pp.begin(model.blocks, 1)
    assert refusal(model) == text(
        "error[unreached-mark]: Module `blocks` is marked, but forward never calls it.",
        " --> test_marks.py",
        " |",
        " | pp.begin(model.blocks, 1)",
        " | ^^^^^^^^^^^^^^^^^^^^^^^^^",
        "help: mark a module that is called (a ModuleList is not), or pp.unmark(model)",
    )


def test_a_marked_call_must_happen() -> None:
    model = Net()
    pp.begin(model.b, 1, call=3)
    assert refusal(model) == text(
        "error[unreached-mark]: Module `b` is marked, but forward never calls it a 4. time.",
        " --> test_marks.py",
        " |",
        " | pp.begin(model.b, 1, call=3)",
        " | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "help: mark a module that is called (a ModuleList is not), or pp.unmark(model)",
    )


def cuts_first(self: Net, x: Tensor) -> Tensor:
    return self.b(self.a(pp.cutpoint(x)))


def test_a_leading_cutpoint_is_refused() -> None:
    assert refusal(Net(cuts_first)) == text(
        "error[leading-mark]: This cutpoint comes before the first operation, so there is nothing to cut off.",
        " --> test_marks.py",
        " |",
        " | return self.b(self.a(pp.cutpoint(x)))",
        " | ^^^^^^^^^^^^^^",
        "help: remove it",
    )


def cuts_last(self: Net, x: Tensor) -> Tensor:
    return pp.cutpoint(self.b(pp.cutpoint(self.a(x))))


def test_a_trailing_cutpoint_is_refused() -> None:
    assert refusal(Net(cuts_last)) == text(
        "error[trailing-mark]: Nothing runs after this cutpoint, so there is no next stage.",
        " --> test_marks.py",
        " |",
        " | return pp.cutpoint(self.b(pp.cutpoint(self.a(x))))",
        " | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "help: remove it",
    )


def cuts_twice(self: Net, x: Tensor) -> Tensor:
    return self.b(pp.cutpoint(pp.cutpoint(self.a(x))))


def test_adjacent_cutpoints_are_refused() -> None:
    assert refusal(Net(cuts_twice)) == text(
        "error[adjacent-marks]: Nothing runs between these two cutpoints.",
        " --> test_marks.py",
        " |",
        " | return self.b(pp.cutpoint(pp.cutpoint(self.a(x))))",
        " | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        " --> test_marks.py",
        " |",
        " | return self.b(pp.cutpoint(pp.cutpoint(self.a(x))))",
        " | ^^^^^^^^^^^^^^^^^^^^^^ the one before",
        "help: remove one of them",
    )


def mixes_cuts_and_blocks(self: Net, x: Tensor) -> Tensor:
    with pp.stage(0):
        h = self.a(x)
    h = pp.cutpoint(self.b(h))
    return self.c(h)


def test_cutpoints_and_blocks_are_not_mixed() -> None:
    assert refusal(Net(mixes_cuts_and_blocks)) == text(
        MIXED,
        " --> test_marks.py",
        " |",
        " | h = pp.cutpoint(self.b(h))",
        " | ^^^^^^^^^^^^^^^^^^^^^^",
        " --> test_marks.py",
        " |",
        " | with pp.stage(0):",
        " | ^^^^^^^^^^^ a stage with a key",
        "help: use one kind of mark in a model",
    )


def mixes_blocks_and_cuts(self: Net, x: Tensor) -> Tensor:
    h = pp.cutpoint(self.a(x))
    with pp.stage(1):
        return self.b(h)


def test_blocks_and_cutpoints_are_not_mixed() -> None:
    assert refusal(Net(mixes_blocks_and_cuts)) == text(
        MIXED,
        " --> test_marks.py",
        " |",
        " | h = pp.cutpoint(self.a(x))",
        " | ^^^^^^^^^^^^^^^^^^^^^^",
        " --> test_marks.py",
        " |",
        " | with pp.stage(1):",
        " | ^^^^^^^^^^^ a stage with a key",
        "help: use one kind of mark in a model",
    )


def test_cutpoints_and_begin_are_not_mixed() -> None:
    model = Net(lambda self, x: self.b(pp.cutpoint(self.a(x))))
    pp.begin(model.b, 1)
    assert refusal(model) == text(
        MIXED,
        " --> test_marks.py",
        " |",
        " | model = Net(lambda self, x: self.b(pp.cutpoint(self.a(x))))",
        " | ^^^^^^^^^^^^^^^^^^^^^^",
        " --> test_marks.py",
        " |",
        " | pp.begin(model.b, 1)",
        " | ^^^^^^^^^^^^^^^^^^^^ a stage with a key",
        "help: use one kind of mark in a model",
    )


def begins_in_a_block(self: Net, x: Tensor) -> Tensor:
    with pp.stage(0):
        return self.b(self.a(x))


def test_begin_inside_a_block_is_refused() -> None:
    model = Net(begins_in_a_block)
    pp.begin(model.b, 1)
    assert refusal(model) == text(
        "error[begin-in-block]: Stage 1 begins inside the block of stage 0, which ends before it could.",
        " --> test_marks.py",
        " |",
        " | pp.begin(model.b, 1)",
        " | ^^^^^^^^^^^^^^^^^^^^",
        " --> test_marks.py",
        " |",
        " | with pp.stage(0):",
        " | ^^^^^^^^^^^ the block",
        "help: use pp.place for modules inside a block",
    )


def test_a_stage_that_begins_again_is_refused() -> None:
    model = Net(lambda self, x: self.a(self.b(self.a(self.c(x)))))
    pp.begin(model.a, 1)
    pp.begin(model.b, 2)
    assert refusal(model) == text(
        "error[begin-again]: Stage 1 begins again after stage 2 had begun: its module is called more than once.",
        " --> test_marks.py",
        " |",
        " | pp.begin(model.a, 1)",
        " | ^^^^^^^^^^^^^^^^^^^^",
        "help: say which call is meant, pp.begin(module, key, call=0), or use pp.place",
    )


def reads_the_same(self: Net, x: Tensor) -> Tensor:
    with pp.stage(1):
        h = self.a(x)
    with pp.stage("1"):
        return self.b(h)


def test_two_keys_that_read_the_same_are_refused() -> None:
    assert refusal(Net(reads_the_same)) == text(
        "error[ambiguous-key]: Stage '1' and stage 1 are two stages that read the same.",
        " --> test_marks.py",
        " |",
        ' | with pp.stage("1"):',
        " | ^^^^^^^^^^^^^",
        " --> test_marks.py",
        " |",
        " | with pp.stage(1):",
        " | ^^^^^^^^^^^ the other one",
        "help: use one spelling",
    )


def marks_nothing(self: Net, x: Tensor) -> Tensor:
    with pp.stage(0):
        h = self.a(x)
    with pp.stage(1):
        pass
    return self.b(h)


def test_a_block_in_which_nothing_runs_is_refused() -> None:
    assert refusal(Net(marks_nothing)) == text(
        "error[empty-stage]: Stage 1 is marked, but nothing runs in it.",
        " --> test_marks.py",
        " |",
        " | with pp.stage(1):",
        " | ^^^^^^^^^^^",
        "help: remove it",
    )
