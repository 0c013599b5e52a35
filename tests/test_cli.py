"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ppdsl.cli import main
from ppdsl.cli.entry import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parent.parent
DEMO = "ppdsl.demo:make"
GOOD = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
DEADLOCK = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"

MODELS = '''\
"""Models in every form in which --model takes them, and in forms in which it does not."""

import torch
from torch import nn

from helper import WIDTH
from ppdsl.annotate import stage


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        with stage("a"):
            x = self.first(x)
        with stage("b"):
            return (self.second(x) * scale).square().mean()


def pair():
    return Net(), (torch.randn(4, WIDTH),)


def single():
    return Net(), torch.randn(4, WIDTH)


def triple():
    return Net(), (torch.randn(4, WIDTH),), {"scale": 2.0}


def mapping():
    return {"model": Net(), "args": (torch.randn(4, WIDTH),), "kwargs": {"scale": 2.0}}


def bare():
    return Net()


def misspelt():
    return {"model": Net(), "arguments": ()}


def not_a_model():
    return 3, ()


def broken():
    raise ZeroDivisionError("in the user's own code")


VALUE = 3
'''


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of models, in a working directory of its own."""
    (tmp_path / "nets.py").write_text(MODELS)
    (tmp_path / "helper.py").write_text("WIDTH = 8\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "nets.py"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---------------------------------------------------------------- as a whole


def test_the_version_is_printed_with_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"ppdsl \d+\.\d+\.\d+\n", out)


def test_help_lists_the_commands_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in ("demo", "graph", "timeline", "verify", "run"))
    assert "exit codes: 0 fine, 1 findings, 2 wrong use, 3 a run failed" in out


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: ppdsl {command}")
    assert "options:" in out


def test_the_parser_of_all_commands_knows_the_options_of_each() -> None:
    options = build_parser().parse_args(["timeline", "--ranks-shown", "0-2"])
    assert options.ranks_shown == (0, 1, 2)
    assert build_parser().parse_args(["run", "--nproc", "2", "train.py"]).nproc == 2


@pytest.mark.parametrize(
    "arguments", [(), ("fly",), ("timeline", "--ranks", "0"), ("graph",), ("timeline", "--width", "9")]
)
def test_wrong_use_has_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err


@pytest.mark.parametrize("command", ["--help", "timeline", "verify {file}", "timeline --schedule {file}"])
def test_commands_without_a_model_do_not_load_torch(tmp_path: Path, command: str) -> None:
    file = tmp_path / "own.csv"
    file.write_text(GOOD)
    arguments = command.format(file=file).split()
    source = f"import sys; from ppdsl.cli import main; main({arguments}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_dash_m_ppdsl_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ppdsl", "timeline", "--microbatches", "2", "--ranks", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank 1 │" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(("name", "value", "colored"), [("FORCE_COLOR", "1", True), ("NO_COLOR", "1", False)])
def test_colour_is_on_only_when_asked_for_or_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, colored: bool
) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(name, value)
    _, out, _ = run(capsys, "timeline")
    assert ("\x1b[" in out) == colored


def test_no_color_wins_over_force_color(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in run(capsys, "timeline")[1]


def test_an_unexpected_error_keeps_its_traceback_and_has_exit_code_3(
    capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    code, _, err = run(capsys, "graph", "--model", f"{models}:broken")
    assert code == 3
    assert "Traceback" in err
    assert "ZeroDivisionError: in the user's own code" in err


# ---------------------------------------------------------------- timeline


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


# ---------------------------------------------------------------- verify


def test_a_schedule_without_fault_is_proved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(GOOD)
    code, out, err = run(capsys, "verify", tmp_path / "own.csv")
    assert (code, err) == (0, "")
    assert "own.csv is proved for a chain of 2 stages" in out
    assert "2 ranks, 2 stages, 2 micro-batches, 8 actions, 4 messages" in out
    assert out.splitlines()[-3:] == [
        "rank  stages  F  B  I  W  sends  receives  holds  first at",
        "   0  0       2  2  0  0      2         2      2  0F1",
        "   1  1       2  2  0  0      2         2      1  1F0",
    ]


def test_split_backwards_are_proved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    code, out, _ = run(capsys, "verify", tmp_path / "own.csv")
    assert code == 0
    assert "   1  1       2  0  2  2      2         2      2  1F1" in out


def test_ranks_that_wait_for_each_other_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(DEADLOCK)
    _, _, err = run(capsys, "verify", tmp_path / "own.csv")
    assert err.splitlines()[:5] == [
        "error[deadlock]: Ranks 0 and 1 wait for each other: 0B0 needs 1B0, which never runs.",
        "rank 0 | 0F0 0B0 0F1 0B1",
        "       |     ^^^ waits for 1B0 of rank 1",
        "rank 1 | 1F1 1B1 1F0 1B0",
        "       | ^^^ waits for 0F1 of rank 0",
    ]


def test_a_proof_as_json_is_one_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(GOOD)
    found = json.loads(run(capsys, "verify", tmp_path / "own.csv", "--format", "json")[1])
    assert (found["proved"], found["ranks"], found["messages"]) == (True, 2, 4)
    assert (found["peak_activations"], found["peak_actions"]) == ([2, 1], ["0F1", "1F0"])


@pytest.mark.parametrize("text", [DEADLOCK, "0F0,0B0\n1F0\n", "0F0,junk\n", "", "0B0,0F0\n"])
def test_a_faulty_schedule_has_findings_on_the_standard_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "own.csv").write_text(text)
    code, out, err = run(capsys, "verify", tmp_path / "own.csv")
    assert (code, out) == (1, "")
    assert err.startswith("error[")


def test_findings_as_json_are_one_object_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(DEADLOCK)
    code, _, err = run(capsys, "verify", tmp_path / "own.csv", "--format", "json")
    assert code == 1
    assert all({"severity", "code", "message"} <= json.loads(line).keys() for line in err.splitlines())


def test_a_file_that_cannot_be_read_is_wrong_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "verify", tmp_path / "none.csv")
    assert code == 2
    assert "none.csv cannot be read: No such file or directory." in err


def test_a_binary_file_is_wrong_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_bytes(b"\xff\xfe\x00")
    code, _, err = run(capsys, "verify", tmp_path / "own.csv")
    assert code == 2
    assert "cannot be read: it is no text." in err


def test_a_schedule_for_another_number_of_stages_does_not_fit_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own.csv").write_text(GOOD)
    code, _, err = run(capsys, "verify", tmp_path / "own.csv", "--model", DEMO)
    assert code == 1
    assert "own.csv has 2 stages, but the model UNet 5." in err


# ---------------------------------------------------------------- graph and --model


@pytest.mark.parametrize("function", ["pair", "single", "triple", "mapping"])
@pytest.mark.parametrize("place", ["nets", "nets.py", "./nets.py"])
def test_a_model_is_taken_in_every_form(
    capsys: pytest.CaptureFixture[str], models: Path, function: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nets", "helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    code, out, err = run(capsys, "graph", "--model", f"{place}:{function}", "--format", "json")
    assert (code, err) == (0, "")
    assert [stage["key"] for stage in json.loads(out)["stages"]] == ["a", "b"]


WRONG_MODELS = {
    "nets": "error[bad-model]: --model nets does not name a function.",
    "nets.py:": "error[bad-model]: --model nets.py: does not name a function.",
    "nowhere.nets:pair": "error[unknown-module]: There is no module 'nowhere' here or among the installed packages.",
    "net.py:pair": "error[no-such-file]: There is no file net.py.\nhelp: did you mean nets.py?",
    "nets.py:pairs": "error[unknown-function]: nets.py has no function 'pairs'.\nhelp: did you mean nets.py:pair?",
    "nets.py:VALUE": "error[unknown-function]: nets.py has something that is no function (int) as 'VALUE'.",
    "nets.py:bare": "error[bad-model]: nets.py:bare returns an object of type Net, not a model with its arguments.",
    "nets.py:misspelt": "error[bad-model]: nets.py:misspelt returns a dict with the key 'arguments'.",
    "nets.py:not_a_model": "error[bad-model]: nets.py:not_a_model gives an object of type int as the model.",
    "1-2:make": "error[bad-model]: '1-2' is neither a module nor a Python file.",
}


@pytest.mark.parametrize("target", WRONG_MODELS)
def test_a_wrong_model_is_wrong_use_with_a_remedy(
    capsys: pytest.CaptureFixture[str], models: Path, target: str
) -> None:
    code, out, err = run(capsys, "graph", "--model", target)
    assert (code, out) == (2, "")
    assert err.startswith(WRONG_MODELS[target])
    assert "\nhelp: " in err


def test_a_module_that_lacks_an_import_of_its_own_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    models.with_name("lacking.py").write_text("import not_installed_anywhere\n")
    code, _, err = run(capsys, "graph", "--model", "lacking:make")
    assert code == 3
    assert "No module named 'not_installed_anywhere'" in err


@pytest.mark.parametrize(
    ("view", "seen"),
    [("tree", "├── stage 0"), ("dag", "│ stage 0 "), ("table", "stage  rank  modules"), ("both", "├── stage 0")],
)
def test_a_graph_is_shown_in_each_view(capsys: pytest.CaptureFixture[str], view: str, seen: str) -> None:
    code, out, err = run(capsys, "graph", "--model", DEMO, "--view", view, "--width", 80)
    assert (code, err) == (0, "")
    assert seen in out


@pytest.mark.parametrize(
    ("form", "start"),
    [("mermaid", "flowchart TD\n"), ("dot", 'digraph "UNet" {\n'), ("json", '{"name": "UNet"'), ("svg", "<svg ")],
)
def test_a_graph_is_written_in_each_format(capsys: pytest.CaptureFixture[str], form: str, start: str) -> None:
    code, out, _ = run(capsys, "graph", "--model", DEMO, "--format", form)
    assert code == 0
    assert out.startswith(start)


# ---------------------------------------------------------------- run


def test_a_script_that_does_not_exist_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "run", "--nproc", 2, "nowhere.py")
    assert code == 2
    assert err.startswith("error[no-such-file]: There is no file nowhere.py.")


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 3), (-9, 3)])
def test_the_status_of_torchrun_becomes_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    started: list[list[str]] = []

    def start(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr("ppdsl.cli.launch.subprocess.run", start)
    found, _, err = run(capsys, "run", "--nproc", 2, script, "--epochs", 3, "--nproc", 9)
    assert found == code
    assert started[0][1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), "--epochs", "3",
        "--nproc", "9",
    ]  # fmt: skip
    assert ("error[run-failed]" in err) == (code == 3)


@pytest.mark.distributed
def test_a_script_runs_on_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])")
    command = [sys.executable, "-m", "ppdsl", "run", "--nproc", "2", str(script), str(tmp_path / "rank")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["2", "2"]


# ---------------------------------------------------------------- demo


def test_the_demo_trains_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "demo", "--steps", 12, "--microbatches", 4, "--width", 100)
    assert (code, err) == (0, "")
    losses = [float(number) for number in re.findall(r"loss (\d\.\d+)", out)]
    assert losses[-1] < losses[0] / 2
    assert "│ stage 4  rank 4" in out
    assert out.count("rank 4 │") == 2


def test_the_demo_gives_the_same_losses_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (re.findall(r"loss \d.*", run(capsys, "demo", "--steps", 4)[1]) for _ in range(2))
    assert first == second
    assert len(first) == 4


def test_the_demo_says_when_the_loss_does_not_fall(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppdsl.cli.demonstration.LEARNING_RATE", 10.0)
    code, _, err = run(capsys, "demo", "--steps", 2)
    assert code == 1
    assert err.startswith("error[loss-did-not-fall]: The loss did not fall: 0.3097 at step 1, ")
