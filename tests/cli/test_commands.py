"""All commands but `ppdsl timeline`, and what they have in common."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppdsl.cli.entry import COMMANDS, build_parser
from tests.cli.running import DEADLOCK, DEMO, GOOD, ROOT, run

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
