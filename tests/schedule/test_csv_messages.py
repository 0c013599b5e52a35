"""CSV files with communications: messages are checked and left out."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.shapes import chain_graph
from ppdsl.schedule import build_schedule, families, parse_csv, to_csv
from ppdsl.schedule.csv_cells import parse_cell
from tests.schedule.sizes import on_chain

FINE = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0\n"


@given(name=st.sampled_from(list(families())), p=st.integers(1, 5), m=st.integers(1, 9), v=st.integers(1, 3))
def test_every_family_with_communications_is_read_back(name: str, p: int, m: int, v: int) -> None:
    schedule, _ = on_chain(name, p, m, v)
    again = parse_csv(to_csv(schedule, communications=True))
    assert (again.rows, again.placement, again.overlaps) == (schedule.rows, schedule.placement, schedule.overlaps)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1RECV_F0,", "", "0SEND_F0 is never received: there is no 1RECV_F0."),
        ("0SEND_F0,", "", "1RECV_F0 is never sent: there is no 0SEND_F0."),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "0SEND_F0 belongs after 0F0, whose value it moves."),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "1RECV_F0 belongs before 1F0, whose value it moves."),
        ("1B0,1SEND_B0", "1SEND_B0,1B0", "1SEND_B0 belongs after 1B0, whose value it moves."),
        ("0SEND_F0", "0SEND_F0,0SEND_F0", "A message is sent and received once. Found 0SEND_F0 again."),
        ("1F0", "0SEND_F0,1F0", "A message is sent and received once. Found 0SEND_F0 again."),
        ("1F0", "1F0,0SEND_F7", "0SEND_F7 stands on rank 1, but stage 0 is on rank 0."),
        ("1F0", "1F0,9SEND_F0", "9SEND_F0 stands on rank 1, but stage 9 is on no rank."),
        ("0F0,0SEND_F0", "0F0,0SEND_F0,0SEND_F5", "0SEND_F5 belongs to no computation: stage 0 never runs F5."),
    ],
)
def test_messages_that_cannot_be_are_found(old: str, new: str, message: str) -> None:
    assert parse_csv(FINE).placement == (0, 1)
    with pytest.raises(ScheduleError) as caught:
        parse_csv(FINE.replace(old, new), name="own.csv")
    assert message in str(caught.value)
    assert "own.csv:" in str(caught.value)


def test_a_message_that_is_missing_on_both_ends_is_found() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_csv(FINE.replace("0SEND_F0,", "").replace("1RECV_F0,", ""), name="own.csv")
    assert str(caught.value) == (
        "error[missing-message]: 1F0 needs a value of another rank, but no message brings it: there is no 1RECV_F0.\n"
        " --> own.csv:2:1\n"
        "  |\n"
        "2 | 1F0,1B0,1SEND_B0\n"
        "  | ^^^\n"
        "help: add 1RECV_F0 before it, and 0SEND_F0"
    )


@pytest.mark.parametrize(
    ("cell", "help_text"),
    [
        ("0f0", "did you mean 0F0?"),
        ("0F", "give the micro-batch: 0F0"),
        ("0SEND_F", "give the micro-batch: 0SEND_F0"),
        ("0UNSHARD3", "leave the micro-batch out: 0UNSHARD"),
        ("F0", "write stage, kind (F, B, I or W) and micro-batch, as in 2F0"),
        ("0F-1", "write stage, kind (F, B, I or W) and micro-batch, as in 2F0"),
        ("٣F0", "write stage, kind (F, B, I or W) and micro-batch, as in 2F0"),
    ],
)
def test_cells_that_say_nothing_are_refused_with_what_to_write(cell: str, help_text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_csv(f"0F0,{cell}\n", name="own.csv")
    assert str(caught.value).endswith(f"help: {help_text}")


@given(text=st.text(alphabet="0123FBIWSENDRCV_();OVLAP \t", max_size=24))
def test_any_text_is_read_or_refused_and_nothing_else(text: str) -> None:
    cell = parse_cell(text)
    assert cell is None or not isinstance(cell, tuple) or len(cell) in (1, 2)
    with contextlib.suppress(ScheduleError):
        parse_csv(text)


def test_an_order_whose_ranks_wait_for_each_other_has_no_communications() -> None:
    stuck = parse_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ScheduleError, match="Rank 0 waits at 0B0 for a value that nobody sends before it"):
        to_csv(stuck, communications=True)


def test_stages_of_one_rank_exchange_no_messages() -> None:
    text = to_csv(build_schedule("zbv", chain_graph(2), (0, 0), 2), communications=True)
    assert "SEND" not in text
    assert "RECV" not in text
