"""`ppdsl timeline`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.running import DEMO, GOOD, run


def test_a_timeline_has_chart_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "timeline", "--schedule", "1f1b", "--ranks", 4, "--microbatches", 8, "--width", 80)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "1f1b: 4 ranks, 8 micro-batches, equal stages" + "predicted".rjust(36)
    assert "makespan 33 F   bubble 27.3 %   100 % of the lower bound 33 F" in out
    assert "most activations held 4 (rank 0)" in out


def test_a_timeline_as_json_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "timeline", "--format", "json", "--backward", 3, "--latency", 0.5)
    found = json.loads(out)
    assert code == 0
    assert {"makespan", "bubble", "max_rank_span", "lower_bound", "peak_activations", "actions"} <= found.keys()
    assert found["peak_activations"] == [4, 3, 2, 1]
    assert found["actions"][0]["action"] == "0F0"
    assert max(action["end"] for action in found["actions"]) == found["makespan"]


def test_costs_are_given_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "timeline", "--cost", "F=1,I=1,W=2,latency=0", "--format", "json")
    assert json.loads(out)["makespan"] == (8 + 3) * 4


@pytest.mark.parametrize("cost", ["F=one", "G=1", "F=-1", "F", "F=inf"])
def test_a_wrong_cost_is_wrong_use(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    code, out, err = run(capsys, "timeline", "--cost", cost)
    assert (code, out) == (2, "")
    assert err.startswith(
        f"error[wrong-use]: --cost has {cost!r}, which is no cost.\nhelp: write numbers for some of F"
    )


def test_an_unknown_schedule_is_wrong_use_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "timeline", "--schedule", "gpip")
    assert (code, out) == (2, "")
    assert "There is no schedule named 'gpip'." in err
    assert "did you mean 'gpipe'?" in err


def test_schedules_are_compared_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "timeline", "--compare", "1f1b, gpipe", "--width", 80)
    assert code == 0
    assert out.splitlines()[:5] == [
        "4 ranks, 8 micro-batches, equal stages",
        "",
        "schedule  stages  makespan  bubble  period  bubble  optimal  held",
        "1f1b           4      33 F  27.3 %    33 F  27.3 %    100 %     4",
        "gpipe          4      33 F  27.3 %    33 F  27.3 %    100 %     8",
    ]


def test_compared_schedules_get_the_stages_that_their_family_needs_and_the_same_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = "1f1b,interleaved_1f1b(v=2),zero_bubble(h2),zbv"
    code, out, _ = run(capsys, "timeline", "--compare", names, "--width", 100)
    assert code == 0
    assert out.splitlines()[3:7] == [
        "1f1b                        4      33 F  27.3 %    33 F  27.3 %    100 %     4",
        "interleaved_1f1b(v=2)       8    28.5 F  15.8 %  28.5 F  15.8 %    100 %   5.5",
        "zero_bubble(h2)             4      27 F  11.1 %    24 F   0.0 %    100 %     7",
        "zbv                         8    25.5 F   5.9 %    24 F   0.0 %    100 %     4",
    ]


def test_a_compared_schedule_that_cannot_be_built_is_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("timeline", "--compare", "1f1b,zbv", "--ranks", 4, "--stages", 4, "--width", 200)
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.splitlines()[3].startswith("1f1b ")
    assert "zbv cannot be built: The schedule goes there and back over 4 ranks, which takes 8 stages. Found 4." in out
    lines = run(capsys, *arguments, "--format", "json")[1].splitlines()
    assert "makespan" in json.loads(lines[0])
    assert json.loads(lines[1])["findings"][0]["code"] == "placement-not-v"


def test_nothing_but_schedules_that_cannot_be_built_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "timeline", "--compare", "zbv", "--ranks", 4, "--stages", 4)
    assert code == 1
    assert "zbv cannot be built" in out


@pytest.mark.parametrize("name", ["zbv", "zero_bubble(h1)", "interleaved_1f1b(v=2)", "1f1b"])
def test_json_has_the_expected_figures_in_stage_times(capsys: pytest.CaptureFixture[str], name: str) -> None:
    cost = ("--cost", "F=1,I=1,W=1,latency=0", "--format", "json")
    found = json.loads(run(capsys, "timeline", "--schedule", name, "--ranks", 4, "--microbatches", 8, *cost)[1])
    makespan, span, stages, peak = {
        "zbv": (51, 48, 8, 8), "zero_bubble(h1)": (27, 27, 4, 4), "interleaved_1f1b(v=2)": (57, 57, 8, 11),
        "1f1b": (33, 33, 4, 4),
    }[name]  # fmt: skip
    assert (found["makespan"], found["max_rank_span"], found["stages"]) == (makespan, span, stages)
    assert (found["lower_bound"], max(found["peak_activations"])) == (makespan, peak)
    assert found["period"] <= makespan
    assert [found["placement"][action["stage"]] for action in found["actions"]] == [a["rank"] for a in found["actions"]]


def test_json_has_the_messages_when_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("timeline", "--ranks", 2, "--microbatches", 1, "--latency", 0.5, "--format", "json")
    assert "messages" not in json.loads(run(capsys, *arguments)[1])
    assert json.loads(run(capsys, *arguments, "--messages")[1])["messages"] == [
        {"source": 0, "target": 1, "made": "0F0", "used": "1F0", "start": 1.0, "end": 1.5},
        {"source": 1, "target": 0, "made": "1B0", "used": "0B0", "start": 4.5, "end": 5.0},
    ]


def test_messages_are_drawn_below_the_ranks_that_send_them(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "timeline", "--ranks", 2, "--microbatches", 2, "--latency", 1, "--messages")[1]
    assert [line.split("│")[0] for line in out.splitlines()[1:5]] == ["rank 0 ", " sends ", "rank 1 ", " sends "]


def test_a_step_can_go_on_in_a_line_below(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "timeline", "--schedule", "zbv", "--wrap", "--width", 80)[1]
    assert sum(line.startswith("rank 3 │") for line in out.splitlines()) == 2


def test_the_number_of_stages_on_a_rank_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ({"schedule": "looped_bfs", "chunks": 4}, {"schedule": "looped_bfs(v=4)"}):
        arguments = [word for key, value in option.items() for word in (f"--{key}", value)]
        found = json.loads(run(capsys, "timeline", *arguments, "--ranks", 2, "--format", "json")[1])
        assert (found["stages"], found["placement"]) == (8, [0, 1] * 4)


def test_some_ranks_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "timeline", "--ranks", 64, "--ranks-shown", "0-1,63", "--width", 80)[1]
    assert [line.split("│")[0].strip() for line in out.splitlines()[1:5]] == ["rank 0", "rank 1", "┆", "rank 63"]


def test_auto_says_what_it_took_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "timeline", "--schedule", "auto", "--width", 80)
    assert code == 0
    assert "makespan 27 F" in out
    assert re.search(r"takes 27 F, 100\.0 % of the lower bound", " ".join(out.split()))
    found = json.loads(run(capsys, "timeline", "--schedule", "auto", "--format", "json")[1])
    assert (found["makespan"], found["proven"]) == (27.0, True)
    assert found["reasons"]


def test_auto_compares_placements_when_nobody_says_where_stages_are(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "timeline", "--compare", "zbv,auto", "--width", 100)[1]
    zbv, auto = (line.split() for line in out.splitlines()[3:5])
    assert auto[0] == "auto:"
    assert auto[-7:] == zbv[-7:]  # the same makespan, period, and memory


def test_a_schedule_that_needs_more_memory_than_there_is_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(capsys, "timeline", "--memory", 3)
    assert code == 1
    assert err.startswith("error[no-memory]: Schedule '1f1b' holds 4 activations on rank 0; its limit is 3.")
    (tmp_path / "own.csv").write_text(GOOD)
    code, _, err = run(capsys, "timeline", "--schedule", tmp_path / "own.csv", "--memory", 1)
    assert code == 1
    assert "own.csv holds 2 on rank 0; its limit is 1." in err


def test_auto_keeps_to_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("timeline", "--schedule", "auto", "--placement", "v", "--memory", 6, "--format", "json")
    found = json.loads(run(capsys, *arguments)[1])
    assert max(found["peak_activations"]) <= 6
    assert found["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("memory", ["0", "x", "-1", "4 bananas"])
def test_memory_that_is_no_amount_is_wrong_use(capsys: pytest.CaptureFixture[str], memory: str) -> None:
    assert run(capsys, "timeline", f"--memory={memory}")[0] == 2


def test_a_size_of_memory_holds_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "timeline", "--model", DEMO, "--memory", "40GiB")[0] == 0
    code, _, err = run(capsys, "timeline", "--model", DEMO, "--memory", "1KiB")
    assert code == 1
    assert "bytes on rank" in err


def test_a_model_gets_the_ranks_that_the_schedule_needs(
    capsys: pytest.CaptureFixture[str], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    found = json.loads(run(capsys, "timeline", "--model", f"{models}:pair", "--schedule", "zbv", "--format", "json")[1])
    assert (found["ranks"], found["placement"]) == (1, [0, 0])


@pytest.mark.parametrize("shown", ["a", "1-", "", "-3"])
def test_ranks_that_are_no_list_are_wrong_use(capsys: pytest.CaptureFixture[str], shown: str) -> None:
    assert run(capsys, "timeline", f"--ranks-shown={shown}")[0] == 2


def test_ranks_that_do_not_exist_cannot_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "timeline", "--ranks-shown", "9-12")
    assert code == 2
    assert "--ranks-shown names rank 9, but there are 4 ranks." in err


def test_compared_schedules_as_json_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "timeline", "--compare", "all", "--format", "json")
    names = [json.loads(line)["schedule"] for line in out.splitlines()]
    assert {"1f1b", "gpipe"} <= set(names)
    assert "forward_only" not in names


def test_more_stages_than_ranks_are_dealt_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "timeline", "--schedule", "gpipe", "--ranks", 2, "--stages", 4, "--width", 80)
    assert code == 0
    assert "stages   rank 0: 0 2   rank 1: 1 3" in out


def test_an_own_order_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(GOOD)
    code, out, _ = run(capsys, "timeline", "--schedule", tmp_path / "own.csv", "--format", "csv")
    assert code == 0
    assert out.splitlines()[1] == "0,0F0,0,F,0,0.0,1.0"


def test_a_trace_is_written_and_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "timeline", "--trace", tmp_path / "out.json")
    assert code == 0
    assert "ui.perfetto.dev" in err
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    # Three names for each rank, the computations, and both ends of an arrow for each message.
    assert len(events) == 3 * 4 + 4 * 8 * 2 + 2 * (2 * 3 * 8)


def test_a_trace_of_several_schedules_names_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("timeline", "--compare", "1f1b,gpipe", "--ranks", 2, "--trace", tmp_path / "out.json")
    assert run(capsys, *arguments)[0] == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"{name} predicted, rank {rank}" for name in ("1f1b", "gpipe") for rank in (0, 1)]
    assert len({event["pid"] for event in events}) == 4


def test_a_trace_that_cannot_be_written_is_wrong_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "timeline", "--trace", tmp_path / "missing" / "out.json")
    assert code == 2
    assert "cannot be written: No such file or directory." in err


def test_a_timeline_as_svg_is_well_formed(capsys: pytest.CaptureFixture[str]) -> None:
    ElementTree.fromstring(run(capsys, "timeline", "--format", "svg")[1])


def test_a_timeline_of_a_model_is_estimated_from_its_operations(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "timeline", "--model", DEMO)
    assert code == 0
    assert "estimated from FLOPs" in out
    assert "rank 4 │" in out


def test_a_model_that_runs_is_measured_beside_its_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "timeline", "--model", DEMO, "--run", "--microbatches", 4)
    assert code == 0
    assert out.count("rank 4 │") == 2
    assert re.search(r"F forward, mean +\S+ us +\S+ us", out.replace(" ms", " us"))
    assert "Ranks took turns in this process." in out


@pytest.mark.parametrize("schedule", ["zbv", "zero_bubble(h1)"])
def test_split_backwards_are_measured_kind_by_kind(
    capsys: pytest.CaptureFixture[str], models: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    arguments = ("timeline", "--model", f"{models}:pair", "--run", "--schedule", schedule, "--microbatches", 3)
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    for row in ("F forward, mean", "I input gradient, median", "W weight gradient, total"):
        assert re.search(rf"{row} +\S+ us +\S+ us +\S+ %", out.replace(" ms", " us"))


def test_running_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "timeline", "--run")
    assert code == 2
    assert err == "error[wrong-use]: --run needs a model to run.\nhelp: add --model my_package.nets:make\n"
