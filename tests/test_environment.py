"""The script that makes the project's environments: what it installs, and what an interruption leaves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROJECT: dict[str, Any] = {
    "project": {
        "name": "ppdsl",
        "dependencies": ["torch>=2.9"],
        "optional-dependencies": {"test": ["pytest"], "dev": ["ppdsl[test]", "ruff"]},
    },
    "tool": {"ppdsl": {"environments": {"current": {"base": ["ppdsl", "torch==2.13.0"], "dev": ["ppdsl[dev]"]}}}},
}


class Installer:
    """Stands in for venv and pip: makes the folder, notes each call, and can fail or be interrupted."""

    def __init__(self) -> None:
        self.installed: list[tuple[str, ...]] = []
        self.answer: int | BaseException = 0

    def call(self, command: list[str], **_: object) -> int:
        if command[1:3] == ["-m", "venv"]:
            (Path(command[3]) / "bin").mkdir(parents=True)
            (Path(command[3]) / "bin" / "python").touch()
            return 0
        if isinstance(self.answer, BaseException):
            raise self.answer
        self.installed.append(tuple(part for part in command[5:] if not part.startswith("-")))
        return self.answer


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".ci" / "environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    return module


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> Installer:
    stand_in = Installer()
    monkeypatch.setattr(script.subprocess, "call", stand_in.call)
    return stand_in


def test_extras_are_replaced_by_what_they_stand_for(script: ModuleType) -> None:
    assert script.layers_of(PROJECT, "current") == {
        "base": ["torch>=2.9", "torch==2.13.0"],
        "dev": ["torch>=2.9", "torch==2.13.0", "pytest", "ruff"],
    }


def test_a_layer_is_installed_once_and_only_as_far_as_asked(script: ModuleType, installer: Installer) -> None:
    home = script.ensure(PROJECT, "current", "base")
    assert script.ensure(PROJECT, "current", "base") == home
    assert installer.installed == [("torch>=2.9", "torch==2.13.0")]
    assert script.ensure(PROJECT, "current", "") == home
    assert installer.installed[1:] == [("torch>=2.9", "torch==2.13.0", "pytest", "ruff")]


@pytest.mark.parametrize("end", [1, KeyboardInterrupt()], ids=["pip fails", "interrupted"])
def test_a_set_up_that_did_not_finish_starts_again_from_nothing(
    script: ModuleType, installer: Installer, end: int | BaseException
) -> None:
    home = script.ensure(PROJECT, "current", "base")
    (home / "left over").touch()
    installer.answer = end
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        script.ensure(PROJECT, "current", "dev")
    installer.answer, installer.installed = 0, []
    script.ensure(PROJECT, "current", "base")  # half of `dev` may be there: nothing of it can be trusted
    assert not (home / "left over").exists()
    assert installer.installed == [("torch>=2.9", "torch==2.13.0")]


def test_an_environment_without_its_python_is_made_again(script: ModuleType, installer: Installer) -> None:
    home = script.ensure(PROJECT, "current", "base")
    (home / "bin" / "python").unlink()
    script.ensure(PROJECT, "current", "base")
    assert len(installer.installed) == 2


def test_another_requirement_is_another_environment(script: ModuleType) -> None:
    changed = {**PROJECT, "project": {**PROJECT["project"], "dependencies": ["torch>=2.10"]}}
    assert script.home_of(changed, "current") != script.home_of(PROJECT, "current")


def test_prune_keeps_only_what_this_checkout_uses(script: ModuleType, installer: Installer) -> None:
    home = script.ensure(PROJECT, "current", "base")
    old = home.parent / "current-0123456789ab"
    old.mkdir()
    script.prune(PROJECT)
    assert home.exists() and not old.exists()


def test_the_real_environments_expand(script: ModuleType) -> None:
    project = script.read_project()
    current = script.layers_of(project, "current")
    assert not [requirement for layer in current.values() for requirement in layer if requirement.startswith("ppdsl")]
    assert len(current["base"]) == 6
    assert "torch_xla==2.9.0" in script.layers_of(project, "xla")["base"]
    assert "torchvision==0.28.0" in script.layers_of(project, "vision")["base"]
