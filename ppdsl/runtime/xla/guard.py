"""What is watched while XLA stages run: devices of operands, operations that XLA lacks, programs compiled again.

torch_xla ends the process when a program has operands on two devices, runs on the CPU what it cannot compile, and
compiles without a word. The first step is watched operation by operation; later ones program by program.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ppdsl.diagnostics import Diagnostic, PpdslWarning, RunError, Severity, render_plain
from ppdsl.recording.compat import TorchDispatchMode, pytree
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.stuck import WATCH

__all__ = ["Programs", "watched"]

STEADY = 2
"""Steps in which programs are compiled: an optimizer makes its state in the first one and uses it in the second."""

_COPIES = ("_to_copy", "copy_", "_copy_from", "_copy_from_and_resize", "lift_fresh", "set_")
"""Operations that are there to move tensors between devices."""

_READS = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
)
"""Operations whose result, or its shape, is needed on the host."""


class _OneDevice(TorchFunctionMode):
    """Raises before an operation gets operands of several devices.

    It looks at what is called, and dispatches by itself only what it will not allow: torch_xla does not functionalize
    what operations make under a dispatch mode, and a view of a view of that reads other elements.
    """

    def __init__(self, where: str, device: torch.device) -> None:
        super().__init__()
        self._where = where
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _stray((args, kwargs), self._device) is None:
            return func(*args, **kwargs)
        with _Operands(self._where, self._device):
            return func(*args, **kwargs)


def _stray(operands: Any, device: torch.device) -> torch.Tensor | None:
    """Return the operand on another device than that of others, which is `device`; None if there is none."""
    leaves = [leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, torch.Tensor)]
    if all(leaf.device != device for leaf in leaves):
        return None
    # A scalar of the CPU becomes part of the program, as on other devices.
    strays = (leaf for leaf in leaves if leaf.device != device and (leaf.dim() or leaf.device.type != "cpu"))
    return next(strays, None)


class _Operands(TorchDispatchMode):
    """Raises at the operation that gets the operands, and names it."""

    def __init__(self, where: str, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        stray = None if name in _COPIES else _stray((args, kwargs), self._device)
        if stray is not None:
            raise self._wrong(name, stray)
        return func(*args, **kwargs)

    def _wrong(self, name: str, leaf: torch.Tensor) -> RunError:
        shape, dtype = list(leaf.shape), str(leaf.dtype).removeprefix("torch.")
        message = f"{self._where} runs on {self._device}, but `{name}` gets a {dtype}{shape} tensor on {leaf.device}."
        advice = "register it as a buffer, or make it with device=x.device"
        return RunError(Diagnostic("xla-wrong-device", message, help=advice))


@contextmanager
def watched(where: str, device: torch.device, report: Callable[[Diagnostic], None]) -> Iterator[None]:
    """Run an action with each operation's operands checked, and report what ran on the CPU.

    Args:
        where: What runs, to begin a sentence.
        device: Where all operands have to be.
        report: Gets a warning for operations that XLA has not.

    Raises:
        RunError: An operation gets operands of several devices.
    """
    before = xla_adapter.fallbacks()
    with _OneDevice(where, device):
        yield
    found = sorted(name for name, count in xla_adapter.fallbacks().items() if count > before.get(name, 0))
    reads = [name for name in found if name in _READS]
    if reads:
        message = f"{where} reads what it computed ({_listed(reads)}), and waits for the device."
        advice = "what depends on these values is compiled again when they change; use torch.where or fixed shapes"
        report(Diagnostic("xla-data-dependent", message, help=advice, severity=Severity.WARNING))
    lacking = [name for name in found if name not in _READS]
    if lacking:
        message = f"{where} runs on the CPU, and waits for the device, what torch_xla lacks: {_listed(lacking)}."
        advice = "use another operation"
        report(Diagnostic("xla-fallback", message, help=advice, severity=Severity.WARNING))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


class Programs:
    """Starts programs and notices those that are compiled when none should be.

    Attributes:
        steps: How many steps have begun.
        warnings: What was said.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.warnings: list[str] = []
        self._seen: dict[str, set[tuple[Any, ...]]] = {}

    def start(self, device: torch.device, name: str, signature: tuple[Any, ...] = (), likely: str = "") -> None:
        """Start what is pending on `device`.

        Args:
            device: Where.
            name: What the program is, to begin a sentence.
            signature: What may differ from one start to the next.
            likely: What it is then that differs.
        """
        steady = self.steps > STEADY
        before = xla_adapter.compilations() if steady else 0
        WATCH.started(str(device), name)
        xla_adapter.launch(device)
        seen = self._seen.setdefault(name, set())
        if steady and xla_adapter.compilations() > before:
            self._report_compiled(name, likely if signature not in seen else "")
        seen.add(signature)

    def _report_compiled(self, name: str, likely: str) -> None:
        cause = likely or "a Python number that differs from step to step, or a scalar that became exactly 0 or 1"
        message = f"{name} was compiled again in step {self.steps}. Likely cause: {cause}."
        advice = "keep shapes and numbers the same, or give what changes as a tensor"
        self.report(Diagnostic("xla-recompiled", message, help=advice, severity=Severity.WARNING))

    def report(self, diagnostic: Diagnostic) -> None:
        """Warn, once for each text."""
        if diagnostic.message not in self.warnings:
            self.warnings.append(diagnostic.message)
            warnings.warn(PpdslWarning(render_plain([diagnostic])), stacklevel=2)
