"""What torch_xla counts."""

from __future__ import annotations

from dataclasses import astuple, dataclass

__all__ = ["Counters"]


@dataclass(frozen=True, slots=True)
class Counters:
    """What torch_xla has counted since the process began.

    Attributes:
        launches: Programs started.
        compilations: Programs compiled.
        downloads: Tensors copied from a device to the host.
        uploads: Tensors copied from the host to a device.
    """

    launches: int
    compilations: int
    downloads: int
    uploads: int

    def since(self, before: Counters) -> Counters:
        """Return what was counted after `before`."""
        return Counters(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))
