"""Timelines for other tools."""

from __future__ import annotations

import csv
import json
from io import StringIO
from xml.etree import ElementTree

from ppdsl.report.timeline_svg import to_svg
from ppdsl.report.traces import to_chrome_trace, to_csv, to_json
from tests.report.samples import make_timeline


def test_json_has_the_figures_and_every_action() -> None:
    timeline = make_timeline("1f1b", 4, 8)
    found = json.loads(to_json(timeline, {"schedule": "1f1b"}))
    assert (found["schedule"], found["makespan"], round(found["bubble"], 4)) == ("1f1b", 33.0, 0.2727)
    assert found["max_rank_span"] == 33.0
    assert len(found["actions"]) == 4 * 8 * 2
    assert found["actions"][0] == {
        "rank": 0, "action": "0F0", "stage": 0, "kind": "F", "microbatch": 0, "start": 0.0, "end": 1.0,
    }  # fmt: skip


def test_csv_has_one_line_an_action() -> None:
    rows = list(csv.DictReader(StringIO(to_csv(make_timeline("gpipe", 2, 3)))))
    assert len(rows) == 12
    assert rows[0]["action"] == "0F0"


def test_a_chrome_trace_has_a_complete_event_for_each_action_and_names_for_rows() -> None:
    timeline = make_timeline("1f1b", 2, 2)
    events = json.loads(to_chrome_trace([timeline, timeline], name="1f1b"))["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 2 * len(timeline.events)
    assert {e["pid"] for e in complete} == {0, 1}
    assert complete[0]["dur"] == 1e6
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"rank 0", "rank 1"}


def test_svg_is_well_formed_with_a_box_for_each_action() -> None:
    timeline = make_timeline("1f1b", 2, 2)
    root = ElementTree.fromstring(to_svg([timeline], title="a < b", unit="F"))
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(filter(None, titles)) == sorted(str(e.action) for e in timeline.events)
