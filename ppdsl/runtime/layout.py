"""How one tensor lies on the wire: its bytes in storage order, and the strides it gets on arrival."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ppdsl.graph.ir import TensorMeta

__all__ = ["Layout", "alone", "dtype_of"]


def dtype_of(name: str) -> torch.dtype:
    """Return torch's element type of that name.

    Raises:
        TypeError: torch has no such element type.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no element type of torch")
    return dtype


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, element type and strides of every tensor that one edge carries.

    A tensor without gaps keeps its recorded strides on the way (`channels_last` stays `channels_last`). One with gaps
    or overlaps (a slice, an expanded tensor) arrives row-major. The gradient of a value has the value's layout: that
    is the layout autograd gives to the `.grad` of a leaf.

    Attributes:
        shape: Sizes, for one micro-batch.
        dtype: Element type.
        stride: Elements between neighbours along each axis, on arrival.
    """

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]

    @classmethod
    def of(cls, meta: TensorMeta) -> Layout:
        """Return the layout of a recorded value.

        >>> Layout.of(TensorMeta((2, 3), "float32", (1, 2))).stride
        (1, 2)
        >>> Layout.of(TensorMeta((2, 3), "float32", (0, 1))).stride
        (3, 1)
        """
        stride = meta.stride if _is_dense(meta.shape, meta.stride) else _row_major(meta.shape)
        return cls(torch.Size(meta.shape), dtype_of(meta.dtype), stride)

    @property
    def numel(self) -> int:
        """Number of elements; a message of none is not sent."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of such a tensor."""
        return self.numel * self.dtype.itemsize

    def conform(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` in this layout: itself when it has it already, otherwise a copy."""
        if tensor.stride() == self.stride and not tensor.is_neg() and not tensor.is_conj():
            return tensor
        plain = tensor.resolve_conj().resolve_neg()
        if _same_memory(self.shape, plain.stride(), self.stride) or plain.device.type == "xla":
            return plain  # an XLA tensor has no strides but those of its shape, whatever it says
        return torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device).copy_(plain)

    def empty(self, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
        """Return a fresh tensor of this layout, with undefined values; pinned: in memory that CUDA devices reach."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device, pin_memory=pinned)

    def wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory of a tensor of this layout as one row of bytes, not a copy of it.

        Bytes, as a transport may lack an element type (NCCL has no int16, gloo's collectives no bfloat16).
        """
        row = tensor.detach().as_strided((self.numel,), (1,))
        if row.is_complex():
            row = torch.view_as_real(row).view(-1)
        return row.view(torch.uint8)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gradient that keeps no memory but its own.

    On the CPU `torch.nn.functional.mse_loss` returns a number that lies in the memory of all differences: kept until
    the end of a step, each would hold as much as a model's output.

    >>> loss = torch.nn.functional.mse_loss(torch.ones(100), torch.zeros(100))
    >>> alone(loss).untyped_storage().nbytes()
    4
    """
    value = tensor.detach()
    if value.device.type == "cpu" and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill one stretch of memory, each place once."""
    if len(stride) != len(shape):
        return False
    step = 1
    for place, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if place != step:
            return False
        step *= size
    return True


def _same_memory(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two strides differ only along axes of size 1, where they mean nothing."""
    return 0 in shape or all(a == b or n == 1 for n, a, b in zip(shape, one, other, strict=True))
