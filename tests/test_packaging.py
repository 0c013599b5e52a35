"""What a user installs: the wheel holds the package, its types, its command, its license, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest

import ppdsl

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install 'ppdsl[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ppdsl").rglob("*.py")}
    grammar = {f"ppdsl/grammar/{path.name}" for path in (ROOT / "grammar").iterdir()}
    held = set(zipfile.ZipFile(wheel).namelist())
    information = {name for name in held if name.startswith(f"ppdsl-{ppdsl.__version__}.dist-info/")}
    assert held - information == sources | grammar | {"ppdsl/py.typed"}


def test_the_wheel_says_its_version_license_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        prefix = f"ppdsl-{ppdsl.__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{prefix}/METADATA").decode())
        assert archive.read(f"{prefix}/entry_points.txt").decode().split() == [
            "[console_scripts]",
            "ppdsl",
            "=",
            "ppdsl.cli:main",
            "[pygments.lexers]",
            "ppspec",
            "=",
            "ppdsl.report.lexer:PpspecLexer",
        ]
        assert f"{prefix}/licenses/LICENSE" in archive.namelist()
    assert (metadata["Version"], metadata["License-Expression"]) == (ppdsl.__version__, "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_package_imports_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    source = f"import sys; sys.path.insert(0, {str(wheel)!r}); import ppdsl; print(ppdsl.__version__, ppdsl.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    version, path = done.stdout.split()
    assert version == ppdsl.__version__
    assert path.startswith(str(wheel))
