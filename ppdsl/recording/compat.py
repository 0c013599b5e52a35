"""Every private torch name that ppdsl needs, in one place; tests run it on each supported torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
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
    "compiled_code_runs_eagerly",
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
    "run_backward",
    "same_storage_key",
    "saves_under_hooks",
    "sequence_number",
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


def compiled_code_runs_eagerly() -> AbstractContextManager[Any]:
    """Keep `torch.compile` off what is called inside: what it met on fakes it would never compile again.

    Where nothing was compiled yet its machinery is not loaded, which takes a second, and there is nothing to keep off.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


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


def run_backward(
    edges: Sequence[Any], gradients: Sequence[torch.Tensor], inputs: Sequence[Any] = (), *, keep_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Run autograd's engine; unlike `torch.autograd.backward` it brings each gradient to its edge's shape and type.

    Args:
        edges: Where to start (`GradientEdge`).
        gradients: One for each edge.
        inputs: Leaves and edges whose gradients to return, while no `.grad` is written; without any, gradients are
            added to `.grad` of all leaves.
        keep_graph: Whether what the nodes have saved is kept.
    """
    run = torch.autograd.Variable._execution_engine.run_backward
    # keep_graph, create_graph, inputs, allow_unreachable
    found: Any = run(tuple(edges), tuple(gradients), keep_graph, False, tuple(inputs), True, accumulate_grad=not inputs)
    return tuple(found or ())


def sequence_number(node: Any) -> int:
    """Return when an autograd node was made; the engine runs the latest first."""
    return int(node._sequence_nr())


def saves_under_hooks(node: Any) -> bool:
    """Whether the tensors that a node has saved are packed by somebody's hooks, as a checkpoint's are.

    Looking gives those that are not a pair of hooks, which change nothing.
    """
    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple | list) else (saved,):
            try:
                one.register_hooks(_pack, _unpack)
            except (AttributeError, RuntimeError) as error:
                if "already been set" in str(error):
                    return True
    return False


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor, version_of(tensor)


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = packed
    if version_of(tensor) != version:
        # Autograd looks after this only where there are no hooks.
        raise RuntimeError("a tensor needed for gradient computation has been modified by an inplace operation")
    return tensor
