"""The example specs are canonical, fit their models, and train like the models alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ppdsl.cli import main
from ppdsl.spec.format import format_spec
from tests import example_specs
from tests.example_specs import LANGUAGE, VISION, gradient_differences, losses_of, model_argument, spec_of
from tests.runtime.launch import launch

every_model = pytest.mark.parametrize("name", [*LANGUAGE, *VISION])


def needs_library_of(name: str) -> None:
    for package in ("transformers",) if name in LANGUAGE else ("timm", "torchvision"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed beside this torch; the vision environment runs this")


def test_every_spec_of_the_folder_is_tested() -> None:
    assert sorted(path.stem for path in example_specs.FOLDER.glob("*.ppspec")) == sorted([*LANGUAGE, *VISION])


@pytest.mark.parametrize("name", [*LANGUAGE, *VISION])
def test_a_spec_is_in_canonical_form(name: str) -> None:
    text = spec_of(name).read_text(encoding="utf-8")
    assert format_spec(text) == text


@pytest.mark.zoo
@every_model
def test_a_spec_fits_its_model_and_its_contracts_hold(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    needs_library_of(name)
    assert main(["check", str(spec_of(name)), "--model", model_argument(name)]) == 0
    heard = capsys.readouterr()
    assert "error[" not in heard.err
    assert "expect" in heard.out


@pytest.mark.zoo
@every_model
def test_a_step_under_a_spec_is_the_model_s_own(name: str) -> None:
    needs_library_of(name)
    assert gradient_differences(name) == []


@pytest.mark.zoo
@pytest.mark.distributed
def test_two_processes_lose_what_one_loses(tmp_path: Path) -> None:
    needs_library_of("gpt2")
    names = {"gpt2": 2, "t5": 2, "clip": None}
    said = [name if ranks is None else f"{name}={ranks}" for name, ranks in names.items()]
    done = launch(2, str(tmp_path), *said, seconds=240.0, worker=Path(example_specs.__file__))
    assert done.returncode == 0, done.stdout + done.stderr
    alone = {name: losses_of(name, ranks) for name, ranks in names.items()}
    for rank in range(2):
        lines = (tmp_path / str(rank)).read_text().splitlines()
        assert [line.split()[0] for line in lines] == list(names)
        for line in lines:
            name, *losses = line.split()
            # Products of matrices may round otherwise where a received tensor lies otherwise in memory.
            assert list(map(float, losses)) == pytest.approx(alone[name], rel=1e-12, abs=0)
