"""`ppdsl check --model` and `ppdsl graph --spec`: what they print, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppdsl.cli.entry import main

MODELS = Path(__file__).with_name("commands.py")
CHAIN = """\
param n = 4

pipeline chain {
    microbatches = 8
    ranks        = n

    stage embed @ 0 { embed }
    split h[*] into n by count as block[i] @ i
    stage head @ n - 1 { norm, head }

    expect stages == n + 2
    expect imbalance <= 1.6
}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "chain.ppspec"
    path.write_text(CHAIN)
    return path


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capfd.readouterr()
    return code, said.out, said.err


def test_check_prints_stages_and_contracts(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "check", spec, "--model", f"{MODELS}:chain", "--width", 100)
    assert (code, err) == (0, "")
    assert out == (
        "stage        modules        parameters     bytes      forward   share        rank\n"
        "embed        embed                  88     704 B       0 FLOP   0.0 %           0\n"
        "block[0..3]  h[0] ... h[3]         280  2.19 KiB  5.12 KFLOP  23.0 %  0, 1, 2, 3\n"
        "head         norm, head            104     832 B  1.76 KFLOP   7.9 %           3\n"
        "\n"
        "contract                 measured\n"
        "expect stages == n + 2   6         holds\n"
        "expect imbalance <= 1.6  1.237     holds\n"
    ).replace("bytes      forward", "bytes     forward").replace("704 B       0 FLOP", "704 B      0 FLOP")


def test_check_shows_a_broken_contract_with_its_figure(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec.write_text(CHAIN.replace("<= 1.6", "<= 1.2"))
    code, out, err = run(capfd, "check", spec, "--model", f"{MODELS}:chain")
    assert code == 1
    assert out.splitlines()[-1].split()[-2:] == ["1.237", "broken"]
    assert err.startswith(
        "error[broken-contract]: `expect imbalance <= 1.2` is broken: imbalance is 1.237, more than 1.2."
    )


def test_check_takes_parameters(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec.write_text(CHAIN.replace("<= 1.6", "<= 1.01"))
    code, out, _ = run(capfd, "check", spec, "--model", f"{MODELS}:chain", "-D", "n=2", "--format", "json")
    assert code == 1
    told = json.loads(out)
    assert [stage["stage"] for stage in told["stages"]] == ["embed", "block[0]", "block[1]", "head"]
    assert [contract["holds"] for contract in told["contracts"]] == [True, False]


def test_check_of_a_spec_that_does_not_fit_ends_with_its_findings(
    spec: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec.write_text("pipeline net { stage a { embed } stage b { h[4], norm } }")
    code, out, err = run(capfd, "check", spec, "--model", f"{MODELS}:chain")
    assert (code, out) == (1, "")
    assert "`h` has 4 elements, 0 to 3" in err


def test_graph_is_drawn_from_a_spec(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("graph", "--spec", spec, "-D", "n=2", "--model", f"{MODELS}:chain", "--format", "json")
    code, out, err = run(capfd, *arguments)
    assert (code, err) == (0, "")
    assert [stage["key"] for stage in json.loads(out)["stages"]] == ["embed", "block[0]", "block[1]", "head"]


def test_a_timeline_is_drawn_of_the_step_that_a_spec_plans(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("timeline", "--spec", spec, "-D", "n=2", "--model", f"{MODELS}:chain", "--format", "json")
    code, out, err = run(capfd, *arguments)
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["schedule"], told["microbatches"], told["placement"]) == ("1f1b", 8, [0, 0, 1, 1])
    code, _, err = run(capfd, "timeline", "--spec", spec)
    assert code == 2
    assert "--spec divides a model" in err


def test_marks_that_a_spec_overrides_are_mentioned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.ppspec"
    path.write_text("pipeline net { stage x { a } stage y { rest } }")
    code, _, err = run(capfd, "graph", "--spec", path, "--model", f"{MODELS}:annotated")
    assert code == 0
    assert "warning[marks-ignored]: The spec divides the model, so 2 stage marks in its code had no effect." in err
