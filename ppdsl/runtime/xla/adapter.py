"""The only module that imports torch_xla: about ten functions, each with what it costs and what it must never be given.

torch_xla is loaded by the first call that needs it; importing this module loads nothing. Private calls of torch_xla are
`permute`, `launch_tensors` and what stands under "collectives" alone, and those that move tensors are tested before
they are used.
"""

# ruff: noqa: SLF001 - torch_xla has no public names for these

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ppdsl.runtime.xla.bounded_wait import starting, waiting
from ppdsl.runtime.xla.counters import Counters
from ppdsl.runtime.xla.installed import is_installed, versions

__all__ = [
    "ALL_DEVICES",
    "JOURNALS",
    "Counters",
    "compilations",
    "counters",
    "device_count",
    "device_kind",
    "device_of",
    "divide",
    "executions",
    "fallbacks",
    "finished",
    "forget_collectives",
    "host_copy",
    "is_installed",
    "is_spmd",
    "launch",
    "launch_all",
    "launch_tensors",
    "launched",
    "pending_all_gather",
    "pending_all_reduce",
    "pending_all_to_all",
    "pending_permute",
    "pending_reduce_scatter",
    "permute",
    "program_key",
    "program_text",
    "random_state",
    "replica_count",
    "required_torch",
    "seed",
    "start_spmd",
    "versions",
    "wait",
    "when_ready",
]

ALL_DEVICES = threading.Lock()
"""Held while a program is given to all devices: two threads could otherwise reach two devices in two orders."""

_LAUNCHING = threading.Lock()

JOURNALS: list[list[int]] = []
"""While there is one, the last one notes the device of each program, and `launch` returns when that has taken it."""


def required_torch() -> str:
    """Return the release of torch (`2.9`) that the installed torch_xla was built for."""
    return ".".join(versions()[1].split(".")[:2])


def device_count() -> int:
    """Return how many XLA devices this process drives. The first call starts torch_xla's runtime."""
    from torch_xla import runtime

    return int(runtime.addressable_device_count())


def device_kind() -> str:
    """Return what the devices are: `CPU`, `TPU`."""
    from torch_xla import runtime

    return str(runtime.device_type())


def device_of(index: int) -> torch.device:
    """Return the device of that position, which is also its position in `permute`."""
    return torch.device("xla", index)


def launch(device: torch.device) -> None:
    """Start everything pending on `device` as one program and return at once.

    Every live tensor of the device is materialised.
    """
    from torch_xla import _XLAC

    _start(partial(_XLAC._xla_step_marker, str(device), [], wait=bool(JOURNALS)), device)


def launch_tensors(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Start the program of these tensors of one device alone and return at once; others stay pending."""
    from torch_xla import _XLAC

    # `sync_xla_data=True` would give away buffers that other pending programs still read.
    _start(partial(_XLAC._xla_sync_multi, list(tensors), [], wait=False, sync_xla_data=False), device)


def _start(call: Callable[..., None], device: torch.device) -> None:
    before = launched() if JOURNALS else 0
    starting(call)
    if JOURNALS:
        JOURNALS[-1] += [device.index] * (launched() - before)
    # A token left from a collective would draw all earlier collectives into the next program.
    forget_collectives(device)


def permute(tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Start one common program on all devices that moves tensors between them, and return at once.

    Args:
        tensors: One for each local device, in their order, all of one shape and element type, materialised.
        pairs: (source, target) positions; every position at most once as source and once as target.

    Returns:
        For each device what it got; zeros where it is no target.
    """
    with ALL_DEVICES:
        for tensor in tensors:
            forget_collectives(tensor.device)  # of a permutation that was interrupted
        moved = [pending_permute(tensor, pairs) for tensor in tensors]
        launch_all([[tensor] for tensor in moved])
    return moved


def launch_all(programs: Sequence[Sequence[torch.Tensor]]) -> None:
    """Start the program of some tensors on each device: of all, as no signal interrupts the thread that does it."""
    starting(_launch_all, programs)


def _launch_all(programs: Sequence[Sequence[torch.Tensor]]) -> None:
    with _LAUNCHING:
        for tensors in programs:
            launch_tensors(tensors, tensors[0].device)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the host; blocks until it is computed."""
    return waiting(tensor.detach().cpu)


def seed(device: torch.device, number: int) -> None:
    """Let the random numbers of `device` begin at `number`; a number is data, never a new program."""
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(number, str(device))


def random_state(device: torch.device) -> int:
    """Return where the random numbers of `device` stand; a draw changes it."""
    import torch_xla.core.xla_model as xm

    return int(waiting(xm.get_rng_state, str(device)))


def wait(devices: Sequence[torch.device] = ()) -> None:
    """Return when everything started on `devices` (none: on all) has ended."""
    import torch_xla.core.xla_model as xm

    waiting(xm.wait_device_ops, xm.xla_real_devices(list(devices)) if devices else [])


def counters() -> Counters:
    """Return torch_xla's own counts."""
    return Counters(launched(), compilations(), _samples("TransferFromDeviceTime"), _samples("TransferToDeviceTime"))


def compilations() -> int:
    """Return how many programs were compiled since the process began."""
    return _counter("UncachedCompile")


def launched() -> int:
    """Return how many programs were started since the process began."""
    return _counter("CachedCompile") + _counter("UncachedCompile")


def finished() -> int:
    """Return how many programs have ended since the process began."""
    return _samples("ExecuteTime")


def executions() -> tuple[int, Sequence[tuple[float, float]]]:
    """Return how many programs have ended, and for the last ones when (`time.time`) and after how many nanoseconds."""
    from torch_xla.debug import metrics

    data = metrics.metric_data("ExecuteTime")
    return (0, ()) if data is None else (int(data[0]), data[2])


def fallbacks() -> dict[str, int]:
    """Return the operations that ran on the CPU because XLA has none such, and how often."""
    from torch_xla.debug import metrics

    return {name: _counter(name) for name in metrics.counter_names() if name.startswith("aten::")}


# ---------------------------------------------------------------- collectives

# Each of these adds one operation to the pending program of a tensor's device and starts nothing. The same has to be
# pending on every local device before one of them is launched, and nothing else with it.


def pending_permute(tensor: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return what this replica gets when tensors move from source to target; zeros where it is no target."""
    from torch_xla import _XLAC

    token = _XLAC._get_all_reduce_token(str(tensor.device))
    moved: torch.Tensor = _XLAC._xla_collective_permute(tensor, token, [list(pair) for pair in pairs])[0]
    return moved


def pending_all_reduce(tensor: torch.Tensor, kind: str, groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the `sum`, `max` or `min` over this replica's group; the groups cover all replicas."""
    from torch_xla import _XLAC

    reduced: torch.Tensor = _XLAC._xla_all_reduce(kind, tensor, 1.0, [list(group) for group in groups], False)
    return reduced


def pending_all_gather(tensor: torch.Tensor, dim: int, groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the tensors of this replica's group along `dim`; all groups are of one size."""
    from torch_xla import _XLAC

    # The layout is not pinned: pinned, the program would depend on the replica, and replicas that differ never meet.
    wanted = [list(group) for group in groups]
    gathered: torch.Tensor = _XLAC._xla_all_gather(tensor, dim, len(wanted[0]), wanted, False, None, None)
    return gathered


def pending_reduce_scatter(tensor: torch.Tensor, dim: int, groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return this replica's piece along `dim` of the sum over its group; all groups are of one size."""
    from torch_xla import _XLAC

    token = _XLAC._get_all_reduce_token(str(tensor.device))
    wanted = [list(group) for group in groups]
    made = _XLAC._xla_reduce_scatter("sum", tensor, token, 1.0, dim, len(wanted[0]), wanted, False, None, None)
    piece: torch.Tensor = made[0]
    return piece


def pending_all_to_all(
    tensor: torch.Tensor, split_dim: int, concat_dim: int, groups: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return along `concat_dim` this replica's piece of each tensor of its group; all groups are of one size."""
    from torch_xla import _XLAC

    token = _XLAC._get_all_reduce_token(str(tensor.device))
    wanted = [list(group) for group in groups]
    exchanged: torch.Tensor = _XLAC._xla_all_to_all(
        tensor, token, split_dim, concat_dim, len(wanted[0]), wanted, False
    )[0]
    return exchanged


def forget_collectives(device: torch.device) -> None:
    """Let the next collective of `device` begin a chain of its own."""
    from torch_xla import _XLAC

    _XLAC._set_all_reduce_token(str(device), None)


def program_key(tensors: Sequence[torch.Tensor]) -> str:
    """Return the same text for tensors that are pending as the same program; takes microseconds."""
    from torch_xla import _XLAC

    return str(_XLAC._get_graph_hash(list(tensors)))


def program_text(tensors: Sequence[torch.Tensor]) -> str:
    """Return the HLO text of the program that is pending for tensors of one device."""
    from torch_xla import _XLAC

    return str(_XLAC._get_xla_tensors_hlo(list(tensors)))


def when_ready(tensor: torch.Tensor, call: Callable[[], None]) -> None:
    """Call `call`, from a thread of torch_xla's, when the launched tensor is computed."""
    from torch_xla import _XLAC

    _XLAC._on_ready_callback(tensor, call)


def replica_count() -> int:
    """Return for how many devices a program is compiled, those of other processes included."""
    from torch_xla import runtime

    return int(runtime.global_runtime_device_count())


def is_spmd() -> bool:
    """Whether this process shows all its devices as one (`use_spmd()`)."""
    from torch_xla import runtime

    return bool(runtime.is_spmd())


def start_spmd() -> bool:
    """Show all devices as one, for good; False when this process has used them one by one."""
    from torch_xla import _XLAC, runtime

    if not runtime.is_spmd() and not _XLAC._xla_get_spmd_config_is_locked():
        runtime.use_spmd()
    return bool(runtime.is_spmd())


def divide(tensor: torch.Tensor) -> None:
    """Lay the first axis of a tensor over all devices, in SPMD mode."""
    from torch_xla.distributed import spmd

    mesh = spmd.Mesh(list(range(replica_count())), (replica_count(),), ("pp",))
    spmd.mark_sharding(tensor, mesh, ("pp", *(None for _ in tensor.shape[1:])))


def _counter(name: str) -> int:
    from torch_xla.debug import metrics

    return int(metrics.counter_value(name) or 0)


def _samples(name: str) -> int:
    from torch_xla.debug import metrics

    data = metrics.metric_data(name)
    return 0 if data is None else int(data[0])
