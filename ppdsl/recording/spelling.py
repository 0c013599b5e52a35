"""What torch.fx can write as Python text, and under which names."""

from __future__ import annotations

import builtins
import keyword
from typing import Any

import torch
from torch import fx

from ppdsl.recording.structure import Atom, Branch, Hole, Template

__all__ = ["can_be_named", "identifier", "is_importable", "plain_arguments"]

# What a GraphModule calls its own: a submodule `graph` of the user's cannot have its name there.
_TAKEN = frozenset(dir(fx.GraphModule(torch.nn.Module(), fx.Graph())))


def can_be_named(path: str) -> bool:
    """Whether a program may reach a module or a parameter as `self.path`.

    >>> can_be_named("blocks.0.proj"), can_be_named("blocks.in"), can_be_named("graph")
    (True, False, False)
    """
    parts = path.split(".")
    return parts[0] not in _TAKEN and all(
        part.isdigit() or (part.isidentifier() and not keyword.iskeyword(part)) for part in parts
    )


def plain_arguments(template: Template, inputs: list[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return (args, kwargs) that fx can write as Python text, or None."""
    try:
        args, kwargs = _plain(template, inputs)
    except _NotPlain:
        return None
    return args, kwargs


class _NotPlain(Exception):
    pass


_PLAIN_ATOMS = (
    type(None),
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(Ellipsis),
)


def _plain(template: Template, inputs: list[fx.Node]) -> Any:
    if isinstance(template, Hole):
        return inputs[template.index]
    if isinstance(template, Atom):
        if type(template.value) in _PLAIN_ATOMS:
            return template.value
        raise _NotPlain
    return _plain_branch(template, inputs)


def _plain_branch(template: Branch, inputs: list[fx.Node]) -> Any:
    children = [_plain(child, inputs) for child in template.children]
    if template.type is tuple or template.type is list or template.type is slice:
        return template.build(children)
    if template.type is dict and all(type(key) is str for key in template.keys):
        return template.build(children)
    raise _NotPlain


def is_importable(target: Any) -> bool:
    """Whether fx can name this function in the text it generates."""
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    if target is getattr or target is setattr:
        return True
    if getattr(torch.Tensor, name or "", None) is target:
        return True
    return (isinstance(module, str) and module.startswith(("torch.nn.functional", "torch._C._nn"))) or _in_torch(
        target, name
    )


def _in_torch(target: Any, name: str | None) -> bool:
    return name is not None and getattr(torch, name, None) is target


def identifier(name: str) -> str:
    """Return a Python name as close to `name` as can be."""
    text = "".join(c if c.isalnum() else "_" for c in name).strip("_") or "value"
    if text[0].isdigit():
        return f"_{text}"
    # The generated code calls builtins itself (`getattr(self.layers, "0")`), and these names may not hide them.
    taken = keyword.iskeyword(text) or hasattr(builtins, text) or text in ("self", "torch")
    return f"{text}_" if taken else text
