"""Every private torch name that ppdsl needs, in one place; tests run it on each supported torch."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

__all__ = [
    "DATA_ERRORS", "SHAPE_ERRORS", "DispatchMode", "FakeTensor", "TorchDispatchMode", "arguments_of", "around_calls",
    "autocast_state", "backward_unannounced", "compiled_code_runs_eagerly", "default_store", "functions_to_intercept",
    "gradient_node", "is_compiled", "is_fake", "is_wrapper", "make_fake_mode", "mode_depths", "new_fake",
    "no_torch_function", "own_attributes", "pytree", "quiet_fakes", "registered_pytree", "run_backward",
    "same_storage_key", "saves_under_hooks", "sequence_number", "unpacked_harmlessly", "version_of",
    "without_dispatch_modes", "without_mode",
]  # fmt: skip

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


def new_fake(mode: Any, like: torch.Tensor, *, parameter: bool) -> torch.Tensor:
    """Return a tensor without data of the size, strides and type of `like`, on the CPU, as `mode` makes them."""
    meta = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
    fake: torch.Tensor = FakeTensor(mode, meta, torch.device("cpu"))
    if parameter:
        fake._is_param = True
    return fake


class DispatchMode(TorchDispatchMode):
    """A mode of which `torch.compile` need not be kept off: inside `compiled_code_runs_eagerly`, nothing is compiled.

    Torch would wrap the handler, at more than what the handler itself costs.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


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


def backward_unannounced(function: Any, args: Any, kwargs: Any) -> None:
    """Do what `Tensor.backward` or `torch.autograd.backward` does, with function modes on in all that it calls."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    roots = _as_tuple(given["self"] if "self" in given else given["tensors"])
    gradients = _as_tuple(given["gradient"] if "self" in given else given["grad_tensors"]) or (None,) * len(roots)
    gradients = torch.autograd._make_grads(roots, gradients, is_grads_batched=False)
    create, keep = given["create_graph"], given["retain_graph"]
    run = torch.autograd.Variable._execution_engine.run_backward
    inputs = _as_tuple(given["inputs"])
    run(roots, gradients, create if keep is None else keep, create, inputs, True, accumulate_grad=True)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    one = isinstance(value, torch.Tensor | torch.autograd.graph.GradientEdge)
    return (value,) if one else tuple(value)


def sequence_number(node: Any) -> int:
    """Return when an autograd node was made; the engine runs the latest first."""
    return int(node._sequence_nr())


def gradient_node(tensor: torch.Tensor) -> tuple[Any, int] | None:
    """Return the autograd node that a tensor's gradient goes into, with the position there; None for a leaf.

    Also None where autograd refuses to tell, for a view that was made under other rules than its base was written.
    """
    try:
        with torch._C.DisableTorchFunction():
            if not tensor._is_view():
                return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)
    except RuntimeError:
        return None


def arguments_of(operator: Any) -> Sequence[Any]:
    """Return the declared arguments of an operator: name and default value of each."""
    declared: Sequence[Any] = operator._schema.arguments
    return declared


def is_compiled(module: Any) -> bool:
    """Whether calls of a module run code that `torch.compile` made."""
    compiled = "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.OptimizedModule)
    return compiled or getattr(module, "_compiled_call_impl", None) is not None


def around_calls(
    module: torch.nn.Module, before: Callable[[], object], around: Callable[[], AbstractContextManager[None]] | None
) -> tuple[dict[str, Any], str, Callable[..., Any]] | None:
    """Return where to put what runs instead of a module's call, hooks included, and what.

    Args:
        module: Whose calls.
        before: Called before each.
        around: Makes the scope of each, whatever its class is; None: without a scope.

    Returns:
        A dictionary, a key and a function; None when the module's class calls it by ways of its own.
    """
    if around is None and type(module).__call__ is not torch.nn.Module.__call__:
        return None
    inner: Callable[..., Any] = getattr(module, "_compiled_call_impl", None) or module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        with contextlib.nullcontext() if around is None else around():
            return inner(*args, **kwargs)

    return vars(module), "_compiled_call_impl", call


def without_mode(mode: Any) -> AbstractContextManager[Any]:
    """Take a function mode off for a while, where it is the innermost one: code that compiles would look into it."""
    inside = mode is not None and torch.overrides._get_current_function_mode() is mode
    return torch.overrides._pop_mode_temporarily() if inside else contextlib.nullcontext()


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
                if "already been set" in str(error) and not _harmless(node, name):
                    return True
    return False


_unpacked: list[int] = []
"""Empty, or how often a hook of ppdsl's own has given back what it had packed."""


def unpacked_harmlessly() -> None:
    """Say that a pair of hooks that may unpack more than once has just unpacked, or exists."""
    _unpacked[:] = [sum(_unpacked) + 1]


def _harmless(node: Any, name: str) -> bool:
    """Whether the hooks around a saved tensor are ppdsl's own."""
    if not _unpacked:
        return False
    before = sum(_unpacked)
    getattr(node, name.replace("_raw_saved_", "_saved_"))
    return sum(_unpacked) > before


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from writing into its log that a call did not work on fakes, which is what is being tried."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor, version_of(tensor)


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = packed
    if version_of(tensor) != version:
        # Autograd looks after this only where there are no hooks.
        raise RuntimeError("a tensor needed for gradient computation has been modified by an inplace operation")
    return tensor
