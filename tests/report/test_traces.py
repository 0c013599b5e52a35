"""Timelines for other tools."""

from __future__ import annotations

import csv
import json
from io import StringIO
from xml.etree import ElementTree

from ppdsl.graph.shapes import chain_graph
from ppdsl.report.timeline_svg import to_svg
from ppdsl.report.traces import to_chrome_trace, to_csv, to_json
from ppdsl.simulation.costs import uniform_costs
from ppdsl.simulation.transfers import transfers
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


def test_a_chrome_trace_has_a_complete_event_for_each_action_and_a_named_process_for_each_rank() -> None:
    timeline = make_timeline("1f1b", 2, 2)
    events = json.loads(to_chrome_trace([timeline, timeline], name="1f1b"))["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 2 * len(timeline.events)
    assert {e["pid"] for e in complete} == {0, 1, 2, 3}  # two timelines of two ranks
    assert complete[0]["dur"] == 1e6
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"rank 0", "rank 1"}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"1f1b predicted, rank {rank}" for rank in (0, 1)] * 2


def test_an_arrow_of_a_trace_goes_from_inside_the_maker_to_the_start_of_the_user() -> None:
    graph = chain_graph(2)
    costs = uniform_costs(graph, latency=0.25)
    timeline = make_timeline("1f1b", 2, 2, costs=costs)
    events = json.loads(to_chrome_trace([timeline], messages=[transfers(timeline, graph, costs)]))["traceEvents"]
    boxes = {e["name"]: e for e in events if e["ph"] == "X"}
    tails, heads = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert len(tails) == len(heads) == 4
    for number, tail in tails.items():
        maker = boxes[tail["name"].split()[0]]
        head = heads[number]
        assert maker["pid"] == tail["pid"] != head["pid"]
        assert maker["ts"] <= tail["ts"] < maker["ts"] + maker["dur"]
        assert any(box["pid"] == head["pid"] and box["ts"] == head["ts"] for box in boxes.values())
        assert head["bp"] == "e"


def test_svg_is_well_formed_with_a_box_for_each_action() -> None:
    timeline = make_timeline("1f1b", 2, 2)
    root = ElementTree.fromstring(to_svg([timeline], title="a < b", unit="F"))
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(filter(None, titles)) == sorted(str(e.action) for e in timeline.events)


def test_svg_has_an_axis_and_a_line_for_each_message() -> None:
    graph = chain_graph(3)
    costs = uniform_costs(graph, latency=0.5)
    timeline = make_timeline("1f1b", 3, 4, costs=costs)
    messages = transfers(timeline, graph, costs)
    root = ElementTree.fromstring(to_svg([timeline], unit="F", messages=[messages]))
    paths = [node.get("d", "") for node in root.iter("{http://www.w3.org/2000/svg}path")]
    assert sum("L" in path for path in paths) == len(messages) == 2 * 2 * 4
    labels = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert labels.count(f"{timeline.makespan:g} F") == 1
    assert "0" in labels
