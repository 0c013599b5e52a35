"""The Gantt chart: golden texts, and the laws that every drawing keeps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from ppdsl.graph.shapes import chain_graph
from ppdsl.report.chart import ASCII, UNICODE, draw_chart
from ppdsl.report.scale import choose_scale, time_quantum
from ppdsl.report.timeline import format_time, render_comparison, render_timeline
from ppdsl.schedule.action import parse_action
from ppdsl.schedule.csv_text import from_rows
from ppdsl.simulation.costs import uniform_costs
from ppdsl.timeline import Event, Timeline
from ppdsl.units import Seconds
from tests.report.samples import check_golden, make_timeline, timeline_of

# Zero bubble on two ranks in a V: rank 0 has stages 0 and 3.
ZERO_BUBBLE = from_rows(
    [
        "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1".split(),
        "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1".split(),
    ],
    name="zero bubble",
)

timelines = st.builds(
    make_timeline,
    st.sampled_from(["1f1b", "gpipe", "sequential"]),
    st.integers(1, 9),
    st.integers(1, 40),
)


def measured(timeline: Timeline, seed: int = 0) -> Timeline:
    """Return a timeline as a clock would give it: in milliseconds, and nothing exactly equal."""
    chance = random.Random(seed)
    events = [
        Event(e.rank, e.action, Seconds((e.start + 0.2 * chance.random()) / 1e3), Seconds(e.end / 1e3))
        for e in timeline.events
    ]
    return replace(timeline, events=tuple(events), measured=True)


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank")]


def colored(text: Text, width: int) -> str:
    console = Console(file=StringIO(), width=width, color_system="truecolor", force_terminal=True)
    console.print(text, no_wrap=True, overflow="ignore", crop=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("1f1b", 4, 8), ("gpipe", 4, 8), ("1f1b", 8, 32)])
def test_a_step_is_drawn_as_its_golden_text(name: str, ranks: int, microbatches: int, width: int) -> None:
    timeline = make_timeline(name, ranks, microbatches)
    text = render_timeline(timeline, width=width, title=f"{name}: a chain of {ranks} stages", unit="F").plain
    check_golden(f"{name}_{ranks}x{microbatches}_{width}", text)


@pytest.mark.parametrize("width", [80, 160])
def test_several_stages_and_split_backwards_are_drawn_as_their_golden_text(width: int) -> None:
    text = render_timeline(timeline_of(ZERO_BUBBLE), width=width, title="zero bubble", unit="F").plain
    check_golden(f"zero_bubble_2x2_{width}", text)


@pytest.mark.parametrize("width", [80, 160])
def test_64_ranks_with_512_microbatches_are_drawn_as_density(width: int) -> None:
    text = render_timeline(make_timeline("1f1b", 64, 512), width=width, title="1f1b", unit="F").plain
    check_golden(f"1f1b_64x512_{width}", text)


def test_a_chart_without_box_characters_is_drawn_as_its_golden_text() -> None:
    timeline = make_timeline("1f1b", 4, 32)
    text = render_timeline(timeline, width=80, title="1f1b", unit="F", bound=105.0, peaks=[4, 3, 2, 1], ascii_only=True)
    assert text.plain.isascii()
    check_golden("1f1b_4x32_ascii", text.plain)


@pytest.mark.parametrize("width", [80, 160])
def test_predicted_and_measured_are_drawn_one_above_the_other(width: int) -> None:
    costs = uniform_costs(chain_graph(4), forward=1e-3, input_grad=1e-3, weight_grad=1e-3)
    predicted = make_timeline("1f1b", 4, 8, costs=costs)
    text = render_comparison(predicted, measured(make_timeline("1f1b", 4, 8)), width=width, title="1f1b").plain
    check_golden(f"comparison_{width}", text)


def test_equal_periods_are_left_out_and_said() -> None:
    text = render_timeline(make_timeline("1f1b", 4, 100), width=80, unit="F").plain
    assert "equal periods of 3 F are left out at ⋯" in text
    assert all(" ⋯ " in row for row in rows_of(text))
    assert "F0F1F2F3" in text
    assert "B99" in text


def test_gpipe_is_folded_in_both_of_its_phases() -> None:
    text = render_timeline(make_timeline("gpipe", 4, 64), width=80, unit="F").plain
    assert all(row.count(" ⋯ ") == 2 for row in rows_of(text))


@given(timelines, st.integers(60, 200), st.booleans())
def test_every_row_is_exactly_as_wide_as_asked_for_and_no_line_is_wider(
    timeline: Timeline, width: int, clocked: bool
) -> None:
    timeline = measured(timeline) if clocked else timeline
    lines = render_timeline(timeline, width=width, unit=None if clocked else "F").plain.splitlines()
    rows = [line for line in lines if line.startswith("rank")]
    assert len(rows) == timeline.ranks
    assert {len(row) for row in rows} == {width}
    assert max(map(len, lines)) <= width


@given(timelines, st.integers(40, 200), st.booleans())
def test_every_action_is_seen_or_counted(timeline: Timeline, columns: int, clocked: bool) -> None:
    timeline = measured(timeline) if clocked else timeline
    chart = draw_chart(timeline, choose_scale(timeline, columns))
    if chart.dense:
        return
    seen = Counter(piece.event for row in chart.rows for piece in row if piece.event is not None)
    assert len(seen) + chart.folded + chart.hidden == len(timeline.events)
    assert all(sum(len(piece.text) for piece in row) == chart.scale.columns for row in chart.rows)


@given(timelines, st.integers(40, 200))
def test_an_exact_chart_gives_every_action_as_many_columns_as_its_time(timeline: Timeline, columns: int) -> None:
    chart = draw_chart(timeline, choose_scale(timeline, columns, fold=False))
    per_unit = chart.scale.columns / timeline.makespan
    if chart.dense or per_unit < 1:
        return
    for row in chart.rows:
        for piece in row:
            if piece.event is not None:
                assert len(piece.text) == round((piece.event.end - piece.event.start) * per_unit)


@given(timelines, st.integers(20, 120))
def test_what_a_fold_hides_is_what_is_drawn_before_it_again(timeline: Timeline, columns: int) -> None:
    scale = choose_scale(timeline, columns, label_columns=3)
    for fold in scale.folds:
        hidden = Counter(
            (e.rank, e.action.stage, e.action.kind) for e in timeline.events if _in(e, fold.start, fold.end)
        )
        before = fold.start - fold.period
        shown = Counter((e.rank, e.action.stage, e.action.kind) for e in timeline.events if _in(e, before, fold.start))
        assert hidden == Counter({key: count * fold.periods for key, count in shown.items()})


def _in(event: Event, start: float, end: float) -> bool:
    return start - 1e-6 <= event.start < end - 1e-6


@given(timelines, st.integers(60, 160), st.booleans())
def test_colour_only_adds_colour(timeline: Timeline, width: int, ascii_only: bool) -> None:
    text = render_timeline(timeline, width=width, unit="F", ascii_only=ascii_only)
    stripped = Text.from_ansi(colored(text, width)).plain
    assert stripped.rstrip("\n") == text.plain


def test_fill_characters_vanish_in_colour() -> None:
    chart = draw_chart(make_timeline("1f1b", 2, 2), choose_scale(make_timeline("1f1b", 2, 2), 60))
    piece = next(piece for row in chart.rows for piece in row if piece.event is not None)
    assert piece.fill
    assert piece.fill_style.color == piece.fill_style.bgcolor == piece.style.bgcolor
    assert piece.style.color != piece.style.bgcolor


def test_the_stages_of_a_rank_differ_in_letters_and_in_shade() -> None:
    timeline = timeline_of(ZERO_BUBBLE)
    chart = draw_chart(timeline, choose_scale(timeline, 40))
    styles = {
        piece.event.action.stage: (piece.label[0].islower(), str(piece.style.bgcolor))
        for piece in chart.rows[0]
        if piece.event is not None and piece.event.action.kind == "F" and piece.event.action.microbatch == 0
    }
    assert styles[0] != styles[3]


@pytest.mark.parametrize("ranks", [65, 128, 1000])
def test_very_many_ranks_share_rows(ranks: int) -> None:
    text = render_timeline(make_timeline("1f1b", ranks, 4), width=80).plain
    rows = rows_of(text)
    assert len(rows) <= 64
    assert {len(row) for row in rows} == {80}


def test_a_rank_without_an_action_is_an_idle_row() -> None:
    event = Event(0, parse_action("0F0"), Seconds(0.0), Seconds(1.0))
    text = render_timeline(Timeline((event,), ranks=2), width=40).plain
    assert rows_of(text)[1] == "rank 1 │" + "·" * 26 + "│  0 %"


@pytest.mark.parametrize("events", [(), (Event(0, parse_action("0F0"), Seconds(0.0), Seconds(0.0)),)])
def test_a_step_in_which_nothing_takes_time_can_be_drawn(events: tuple[Event, ...]) -> None:
    text = render_timeline(Timeline(events, ranks=1), width=60, title="nothing").plain
    assert "makespan 0 us" in text
    assert len(rows_of(text)) == 1


def test_short_actions_that_cannot_be_drawn_are_counted() -> None:
    long = [Event(0, parse_action(f"0F{m}"), Seconds(m * 1.0), Seconds(m + 1.0)) for m in range(10)]
    short = Event(0, parse_action("0F10"), Seconds(10.0), Seconds(10.0001))
    last = Event(0, parse_action("0F11"), Seconds(10.0001), Seconds(11.37))
    text = render_timeline(Timeline((*long, short, last), ranks=1), width=60).plain
    assert "1 action is shorter than a column and not drawn" in text


def test_stage_labels_are_listed_when_they_say_more_than_numbers() -> None:
    timeline = replace(make_timeline("1f1b", 2, 2), stage_labels=("enc", "dec"))
    assert "stages   rank 0: 0=enc   rank 1: 1=dec" in render_timeline(timeline, width=80).plain


def test_a_time_has_its_unit() -> None:
    assert format_time(33.0, "F") == "33 F"
    assert format_time(0.001234) == "1.23 ms"


def test_measured_times_have_no_quantum_and_simulated_ones_do() -> None:
    timeline = make_timeline("1f1b", 3, 4)
    assert time_quantum(timeline) == 1.0
    assert time_quantum(measured(timeline)) is None


def test_letters_alone_tell_the_kinds_apart() -> None:
    for glyphs in (ASCII, UNICODE):
        chart = draw_chart(timeline_of(ZERO_BUBBLE), choose_scale(timeline_of(ZERO_BUBBLE), 40), glyphs)
        for piece in (piece for row in chart.rows for piece in row if piece.event is not None):
            assert piece.event is not None
            assert piece.event.action.kind.value in piece.label.upper()
