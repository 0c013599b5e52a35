"""Runs the examples of findings: what ppdsl says to a script."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import tempfile
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ppdsl as pp
from ppdsl.cli import main
from ppdsl.diagnostics import PpdslError, PpdslWarning, render_plain
from ppdsl.graph.shapes import chain_graph
from ppdsl.schedule.action import ActionKind, action_of
from ppdsl.schedule.registry import build_schedule
from ppdsl.schedule.table import Schedule

__all__ = ["EXAMPLES", "PREAMBLE", "Example", "read_examples", "said_by", "write_examples"]

EXAMPLES = Path(__file__).with_name("examples.txt")
PREAMBLE = '''\
class Two(nn.Module):
    """Two layers in two stages."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)

def mean(y):
    return y.mean()

x = torch.zeros(2, 4)  # one micro-batch
'''
_LEFT_OUT = "not shown: "


@dataclass(frozen=True, slots=True)
class Example:
    """One section of the file.

    Attributes:
        code: The finding's code.
        script: Python that makes it appear; what needs several processes says so instead.
        said: What ppdsl says.
    """

    code: str
    script: str
    said: str

    @property
    def left_out(self) -> str | None:
        """Why there is no script, or None."""
        return self.script.removeprefix(_LEFT_OUT).strip() if self.script.startswith(_LEFT_OUT) else None


def read_examples() -> list[Example]:
    """Return the sections of the file, in its order."""
    found = []
    for section in EXAMPLES.read_text(encoding="utf-8").split("\n===== ")[1:]:
        code, _, rest = section.partition("\n")
        script, _, said = rest.partition("\n-----\n")
        found.append(Example(code, script.rstrip() + "\n", said.rstrip()))
    return found


def write_examples(examples: list[Example]) -> None:
    """Write the file with what ppdsl says now."""
    head = EXAMPLES.read_text(encoding="utf-8").split("\n", 1)[0]
    lines = [head]
    for example in examples:
        lines += [f"===== {example.code}", example.script.rstrip()]
        if example.left_out is None:
            lines += ["-----", said_by(example)]
    EXAMPLES.write_text("\n".join(lines) + "\n", encoding="utf-8")


def said_by(example: Example) -> str:
    """Run an example in an empty folder and return the findings, as they are printed."""
    heard = io.StringIO()
    commands = types.ModuleType("pp")
    commands.__dict__.update({name: getattr(pp, name) for name in pp.__all__})
    commands.cli = _command  # type: ignore[attr-defined]
    names: dict[str, Any] = {"torch": torch, "nn": nn, "pp": commands, "__name__": "net"}
    names |= {"build_schedule": build_schedule, "chain_graph": chain_graph, "replace": replace, "Schedule": Schedule}
    names |= {"F": _actions(ActionKind.FORWARD), "B": _actions(ActionKind.BACKWARD)}
    torch.manual_seed(0)
    with _empty_folder() as folder, contextlib.redirect_stderr(heard), contextlib.redirect_stdout(io.StringIO()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _execute("preamble.py", PREAMBLE, names)
            try:
                _execute("net.py", example.script, names)
            except PpdslError as error:
                heard.write(str(error))
        for warning in caught:
            if issubclass(warning.category, PpdslWarning):
                heard.write(str(warning.message))
    if isinstance(names.get("graph"), pp.StageGraph):
        heard.write(render_plain(names["graph"].warnings))
    return "\n".join(line.rstrip() for line in heard.getvalue().replace(f"{folder}/", "").strip().splitlines())


def _execute(file: str, text: str, names: dict[str, Any]) -> None:
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), names)


def _command(line: str, files: Mapping[str, str] | None = None) -> None:
    for name, text in (files or {}).items():
        Path(name).write_text(text, encoding="utf-8")
    main(line.split())


def _actions(kind: ActionKind) -> Any:
    return lambda stage, microbatch: action_of(stage, kind, microbatch)


@contextlib.contextmanager
def _empty_folder() -> Any:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path.cwd()
        finally:
            os.chdir(before)
