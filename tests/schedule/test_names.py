"""Names of schedules: aliases, arguments, and what is said of wrong ones."""

from __future__ import annotations

import pytest

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.shapes import chain_graph
from ppdsl.schedule import build_schedule, families
from ppdsl.schedule.registry import named_family, schedule_names


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1F1B", "1f1b"),
        (" GPipe ", "gpipe"),
        ("interleaved", "interleaved_1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("interleaved( v = 3 )", "interleaved_1f1b(v=3)"),
        ("zb_h1", "zero_bubble(h1)"),
        ("ZB-H2", "zero_bubble(h2)"),
        ("zero_bubble(variant=H2)", "zero_bubble(h2)"),
        ("zero_bubble()", "zero_bubble"),
        ("looped_bfs(fifo, v=2)", "looped_bfs(v=2, fifo)"),
        ("LoopedBFS", "looped_bfs"),
        ("ZBVZeroBubble", "zbv"),
        ("DualPipeV", "dualpipev"),
        ("v-half", "v_half"),
    ],
)
def test_what_users_type_is_understood(written: str, meant: str) -> None:
    assert str(named_family(written)) == meant
    assert str(named_family(meant)) == meant


def test_arguments_may_be_given_apart_from_the_name() -> None:
    assert str(named_family("interleaved_1f1b", {"v": 2})) == "interleaved_1f1b(v=2)"
    assert str(named_family("zero_bubble", [("", "h2")])) == "zero_bubble(h2)"
    schedule = build_schedule("zero_bubble", chain_graph(2), (0, 1), 3, arguments={"variant": "h2"})
    assert schedule.name == "zero_bubble(h2)"


def test_no_alias_hides_a_name_or_another_alias() -> None:
    words = [alias.partition("=")[0] for family in families().values() for alias in family.aliases]
    assert len({*words, *schedule_names()}) == len(words) + len(schedule_names())


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            "interleaved_1f1b(v=0)",
            "error[bad-argument]: Argument 'v' of schedule 'interleaved_1f1b' is a whole number from 1. Found '0'.\n"
            "help: write for example interleaved_1f1b(v=2)",
        ),
        (
            "zero_bubble(h3)",
            "error[bad-argument]: Argument 'variant' of schedule 'zero_bubble' is one of h1, h2. Found 'h3'.\n"
            "help: did you mean zero_bubble(h2)?",
        ),
        (
            "zero_bubble(varient=h2)",
            "error[unknown-argument]: Schedule 'zero_bubble' has no argument 'varient'.\n"
            "help: did you mean 'variant'? write zero_bubble(h1 | h2)",
        ),
        (
            "gpipe(v=2)",
            "error[unknown-argument]: Schedule 'gpipe' has no argument 'v'.\nhelp: it takes no arguments; write gpipe",
        ),
        (
            "zero_bubble(h1, variant=h2)",
            "error[argument-twice]: Schedule 'zero_bubble' gets 'variant' twice: 'h1' and 'h2'.\nhelp: write it once",
        ),
        (
            "interleaved(v=2",
            "error[bad-schedule-name]: A schedule is a name with arguments in parentheses. Found 'interleaved(v=2'.\n"
            "help: write for example interleaved_1f1b(v=2)",
        ),
        (
            "auto",
            "error[auto-is-searched]: Schedule 'auto' is searched with costs and limits; no rule gives its order.\n"
            "help: call ppdsl.search.find_schedule",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_to_type(written: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        named_family(written)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("written", "placement", "message"),
    [
        (
            "interleaved(v=3)",
            (0, 1, 0, 1),
            "error[wrong-stage-count]: Schedule 'interleaved_1f1b(v=3)' needs 3 stages on each rank, 6 on 2 ranks. "
            "Found 4 stages.\nhelp: write interleaved_1f1b(v=2), or use 6 stages",
        ),
        (
            "interleaved",
            (0, 0, 1, 1),
            "error[placement-not-loop]: The schedule goes round the ranks, so stage 1 belongs on rank 1. "
            "Found rank 0.\n"
            "help: place the stages on ranks 0, 1, 0, 1",
        ),
        (
            "looped_bfs",
            (0, 1, 2, 0),
            "error[placement-not-loop]: The schedule goes round 3 ranks, but 4 stages do not fill whole rounds.\n"
            "help: use 3 or 6 stages",
        ),
        (
            "zbv",
            (0, 1, 2),
            "error[placement-not-v]: The schedule goes there and back over 3 ranks, which takes 6 stages. Found 3.\n"
            "help: use 6 stages",
        ),
        (
            "v_min",
            (0, 1, 0, 1),
            "error[placement-not-v]: The schedule goes there and back over the ranks, so stage 2 belongs on rank 1. "
            "Found rank 0.\nhelp: place the stages on ranks 0, 1, 1, 0",
        ),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(written: str, placement: tuple[int, ...], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build_schedule(written, chain_graph(len(placement)), placement, 4)
    assert str(caught.value) == message
