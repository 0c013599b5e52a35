"""Stages that run as `torch.compile` makes them: which ones, and why others do not.

What is compiled is the stage's program as a whole. Its backward is one node of autograd's graph, so that a split
backward computes the weight gradients with the input gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, PpdslWarning, Severity, render_plain
from ppdsl.graph.ir import Stage
from ppdsl.recording.programs import StageProgram
from ppdsl.runtime.stages.stage import StageState

__all__ = ["Compilation"]


@dataclass(frozen=True)
class Compilation:
    """Which stages are compiled, and how.

    Attributes:
        stages: By the key of each stage that is compiled, what `torch.compile` gets beside its program.
    """

    stages: Mapping[int | str, Mapping[str, Any]] = field(default_factory=dict)

    def program(self, stage: Stage, program: StageProgram, device: torch.device) -> StageProgram:
        """Return what the stage runs; it is compiled when it is first called."""
        if stage.key not in self.stages or _why_not(program, device) is not None:
            return program
        module: Any = torch.compile(program.module, **self.stages[stage.key])
        return replace(program, module=module)

    def settle(self, state: StageState, program: StageProgram, device: torch.device) -> None:
        """Tell a stage that it is compiled, or the user why it is not.

        Args:
            state: The stage.
            program: What it would run if it were not compiled.
            device: Where it computes.
        """
        if state.stage.key not in self.stages:
            return
        if state.program is not program:
            state.splitter.refuse("CompiledFunctionBackward")
            return
        message = f"Stage {state.stage.label} is not compiled: {_why_not(program, device)}."
        state.warnings.append(message)
        found = Diagnostic("stage-not-compiled", message, severity=Severity.WARNING, help="leave it out of compile=")
        warnings.warn(PpdslWarning(render_plain([found])), stacklevel=2)


def _why_not(program: StageProgram, device: torch.device) -> str | None:
    if device.type == "xla":
        return "XLA compiles it by itself"
    if program.draws:
        name = program.draws[0].name.split("|")[0]
        where = f"`{name}`" if name else "forward"
        does = "draws" if program.draws[0].function is not None else "is called as a whole and may draw"
        return f"{where} {does} random numbers, and compiled code would not draw them by step and micro-batch"
    return None
