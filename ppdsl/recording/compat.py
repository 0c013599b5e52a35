"""Every private torch name that ppdsl needs, in one place; tests run it on each supported torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch._functorch import apis as _apis
from torch._functorch import eager_transforms as _eager_transforms
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DATA_ERRORS",
    "SHAPE_ERRORS",
    "FakeTensor",
    "TorchDispatchMode",
    "autocast_state",
    "default_store",
    "functions_to_intercept",
    "is_fake",
    "is_wrapper",
    "make_fake_mode",
    "mode_depths",
    "no_torch_function",
    "own_attributes",
    "pytree",
    "registered_pytree",
    "same_storage_key",
    "version_of",
    "without_dispatch_modes",
]

# Raised by a fake kernel that would need the values of a tensor, or that does not exist.
DATA_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# Among them: the shape of a result depends on the values.
SHAPE_ERRORS = (DynamicOutputShapeException, GuardOnDataDependentSymNode)


def make_fake_mode() -> Any:
    """Return a fake mode that also accepts real tensors among its arguments."""
    return FakeTensorMode(allow_non_fake_inputs=True)


with make_fake_mode():
    _FAKE_ATTRIBUTES = frozenset({*vars(torch.empty(0)), "_is_param"})

# Inside, the recorder may look at tensors without hearing itself.
no_torch_function = torch._C.DisableTorchFunction


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds no data, directly or inside a wrapper."""
    return isinstance(tensor, FakeTensor)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a subclass that wraps others (DTensor, a quantised tensor)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def same_storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number equal for tensors that share memory, or None for tensors without a storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def version_of(tensor: torch.Tensor) -> int:
    """Return how often `tensor` was written in place; 0 for inference tensors, which do not count."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return 0


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the device types for which autocast is on, with their dtypes, and whether casts are cached."""
    state = []
    for device_type in ("cpu", "cuda", "xla"):
        try:
            if torch.is_autocast_enabled(device_type):
                state.append((device_type, torch.get_autocast_dtype(device_type)))
        except RuntimeError:
            continue
    return tuple(state)


def mode_depths() -> tuple[int, int]:
    """Return how many TorchFunctionModes and TorchDispatchModes are entered."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def own_attributes(tensor: torch.Tensor) -> list[str]:
    """Return the attributes that code has set on an activation, beside those that every fake has."""
    return [
        name
        for name in getattr(tensor, "__dict__", {})
        if name not in _FAKE_ATTRIBUTES and not hasattr(FakeTensor, name) and "memo" not in name
    ]


@contextlib.contextmanager
def without_dispatch_modes(*, torch_functions: bool = False) -> Iterator[None]:
    """Run on real tensors, with the recorder's dispatch modes off, and its function mode too unless asked to stay."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), contextlib.nullcontext() if torch_functions else torch._C.DisableTorchFunction():
        yield


def functions_to_intercept() -> tuple[tuple[str, Any], ...]:
    """Return (name, function) of Python functions that a TorchFunctionMode does not see as one call."""
    return (
        ("apply", torch.autograd.Function.apply.__func__),  # type: ignore[attr-defined]
        ("checkpoint", torch.utils.checkpoint.checkpoint),
        ("vmap", _apis.vmap_impl),  # type: ignore[attr-defined]
        ("grad", _eager_transforms.grad_impl),
        ("cond", torch.cond),
        ("autocast_enter", torch.amp.autocast_mode.autocast.__enter__),
        ("autocast_exit", torch.amp.autocast_mode.autocast.__exit__),
        ("manual_seed", torch.random.manual_seed),
        ("seed", torch.random.seed),
        ("set_rng_state", torch.random.set_rng_state),
        ("saved_hooks", torch.autograd.graph.saved_tensors_hooks.__enter__),
    )


def registered_pytree(kind: type) -> tuple[Any, Any] | None:
    """Return (flatten, unflatten) when `kind` was registered as a pytree node, else None."""
    node = pytree.SUPPORTED_NODES.get(kind)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def default_store() -> Any:
    """Return the key-value store that the ranks of torch.distributed met in."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
