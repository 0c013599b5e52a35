"""Run a command in one of the project's environments; make the environment first where it is missing.

    python3 .ci/environment.py current python -m pytest      # all layers of the environment `current`
    python3 .ci/environment.py current:base python -m ppdsl  # only what the layer `base` needs
    python3 .ci/environment.py --prune                       # remove environments that no longer match pyproject.toml

Environments are described in pyproject.toml and kept outside the checkout, in ``$XDG_CACHE_HOME/ppdsl``, under a key of
their requirements and the Python version: clones share them, and a changed requirement gives a new one. ppdsl itself is
not installed into them, it runs from the checkout (``PYTHONPATH``).

An environment is made under a lock. A layer counts as made when its mark is written, and the mark is the last thing
written, so a set-up that was interrupted is done again from the start. Only the standard library is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ppdsl"
OLDEST = (3, 11)
NEWEST = (3, 13)  # of torch_xla 2.9; a newer Python runs all but the environment `xla`


def main(arguments: list[str]) -> None:
    """Make what is missing, then become the command."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        replace_interpreter()
    project = read_project()
    if arguments == ["--prune"]:
        prune(project)
        return
    if len(arguments) < 2 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    name, _, layer = arguments[0].partition(":")
    home = ensure(project, name, layer)
    environment = dict(os.environ)
    environment.pop("PYTHONHOME", None)
    environment["VIRTUAL_ENV"] = str(home)
    environment["PATH"] = os.pathsep.join([str(home / "bin"), os.environ.get("PATH", os.defpath)])
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    try:
        os.execvpe(arguments[1], arguments[1:], environment)
    except FileNotFoundError:
        sys.exit(f"{arguments[1]}: no such command in the environment {arguments[0]}")


def replace_interpreter() -> None:
    """Start again under a Python that fits, if there is one."""
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found is not None:
            os.execv(found, [found, *sys.argv])
    if sys.version_info < OLDEST:
        this = platform.python_version()
        sys.exit(f"ppdsl needs Python 3.{OLDEST[1]} or newer, this is {this}: make PYTHON=/path/to/python")


def read_project() -> dict[str, Any]:
    """Return pyproject.toml."""
    import tomllib  # not there before Python 3.11, where this file must still say what is wrong

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(project: dict[str, Any], wanted: list[str]) -> list[str]:
    """Return `wanted` with ``ppdsl[extra]`` replaced by what ppdsl requires for it."""
    table = project["project"]
    found: list[str] = []
    for requirement in wanted:
        own = re.fullmatch(rf"{table['name']}(?:\[([\w,-]+)\])?", requirement)
        if own is None:
            found.append(requirement)
            continue
        found += table["dependencies"]
        for extra in (own.group(1) or "").split(","):
            found += requirements(project, table["optional-dependencies"][extra]) if extra else []
    return list(dict.fromkeys(found))


def layers_of(project: dict[str, Any], name: str) -> dict[str, list[str]]:
    """Return for each layer of an environment all that is installed up to there."""
    table = project["tool"]["ppdsl"]["environments"]
    if name not in table:
        sys.exit(f"no environment {name!r} in pyproject.toml; there are: {', '.join(table)}")
    layers: dict[str, list[str]] = {}
    wanted: list[str] = []
    for layer, own in table[name].items():
        wanted = [*wanted, *own]
        layers[layer] = requirements(project, wanted)
    return layers


def home_of(project: dict[str, Any], name: str) -> Path:
    """Return where an environment lies, whether it is made or not."""
    text = json.dumps([layers_of(project, name), platform.python_version(), sys.platform, platform.machine()])
    return CACHE / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def ensure(project: dict[str, Any], name: str, layer: str) -> Path:
    """Return an environment's folder, with `layer` (by default the last one) and all below it installed."""
    layers = layers_of(project, name)
    layer = layer or list(layers)[-1]
    if layer not in layers:
        sys.exit(f"no layer {layer!r} in the environment {name!r}; there are: {', '.join(layers)}")
    home = home_of(project, name)
    if usable(home, layer):
        return home
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / f"{home.name}.lock"):
        if not (home / "bin" / "python").exists() or (home / "busy").exists():
            shutil.rmtree(home, ignore_errors=True)
        for step in list(layers)[: list(layers).index(layer) + 1]:
            if not usable(home, step):
                install(home, step, layers[step])
    return home


def usable(home: Path, layer: str) -> bool:
    """Return whether a layer is complete, the Python behind it still there, and nothing half done above it."""
    return (home / f"{layer}.done").exists() and (home / "bin" / "python").exists() and not (home / "busy").exists()


def install(home: Path, layer: str, wanted: list[str]) -> None:
    """Make the environment, if need be, and install one layer into it."""
    started = time.monotonic()
    print(f"setting up {home} ({layer}), once: {' '.join(wanted)}", file=sys.stderr, flush=True)
    if not home.exists() and subprocess.call([sys.executable, "-m", "venv", str(home)]) != 0:
        shutil.rmtree(home, ignore_errors=True)
        sys.exit(f"{sys.executable} -m venv failed; on Debian and Ubuntu: apt-get install python3-venv")
    busy = home / "busy"
    busy.touch()
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check"]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    environment.pop("PYTHONPATH", None)
    status = subprocess.call([*pip, *wanted], env=environment, cwd=home, stdin=subprocess.DEVNULL)
    if status != 0:
        sys.exit(f"installing {layer} failed (pip ended with {status}); the next call starts again")
    (home / f"{layer}.done").touch()
    busy.unlink()
    print(f"set up in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"waiting for another set-up ({path})", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prune(project: dict[str, Any]) -> None:
    """Remove the environments that no call from this checkout would use."""
    current = {home_of(project, name).name for name in project["tool"]["ppdsl"]["environments"]}
    for home in sorted(path for path in CACHE.glob("*-*") if path.is_dir() and path.name not in current):
        print(f"removing {home}")
        with locked(CACHE / f"{home.name}.lock"):
            shutil.rmtree(home)
        (CACHE / f"{home.name}.lock").unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
