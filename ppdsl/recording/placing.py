"""A stage program on the device of its rank.

Models are recorded on fake CPU tensors. A device that the model took from a tensor (`torch.zeros(n, device=x.device)`)
is recorded as that one, and stands for the device of the stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ppdsl.recording.callables import Captured, EnterAmbient, Fill, SetAttribute
from ppdsl.recording.programs import StageProgram
from ppdsl.recording.structure import Atom, Branch, Template
from ppdsl.recording.tape import Ambient

__all__ = ["place_program"]

_RECORDED = torch.device("cpu")
_KEY = "ppdsl_device"


def place_program(program: StageProgram, device: torch.device) -> None:
    """Make the program's own calls work on `device`; modules and parameters are moved by whoever owns them.

    Args:
        program: Changed in place.
        device: Where the stage's tensors are.
    """
    before = getattr(program.module, "meta", {}).get(_KEY, _RECORDED)
    if device == before:
        return
    program.module.meta[_KEY] = device

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value == before else value

    for node in program.module.graph.nodes:
        node.args = map_aggregate(node.args, moved)
        node.kwargs = map_aggregate(node.kwargs, moved)
        if isinstance(node.target, (Fill, SetAttribute)):
            node.target.template = _moved_template(node.target.template, moved)
        elif isinstance(node.target, Captured):
            node.target.place(device)
        elif isinstance(node.target, EnterAmbient) and "xla" in (before.type, device.type):
            node.target = _moved_ambient(node.target, before.type, device.type)
    program.module.recompile()


def _moved_ambient(call: EnterAmbient, before: str, after: str) -> EnterAmbient:
    """Let autocast for the type of device that was recorded stand for that of the stage."""

    def moved(ambient: Ambient) -> Ambient:
        kinds = tuple((after if kind == before else kind, dtype) for kind, dtype in ambient.autocast)
        return replace(ambient, autocast=kinds)

    return EnterAmbient(moved(call.ambient), moved(call.base))


def _moved_template(template: Template, moved: Any) -> Template:
    if isinstance(template, Atom):
        return Atom(moved(template.value))
    if isinstance(template, Branch):
        return replace(template, children=tuple(_moved_template(child, moved) for child in template.children))
    return template
