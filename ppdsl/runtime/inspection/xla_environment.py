"""What the environment says to torch_xla: each variable that matters to a pipeline, and what to set instead.

Nothing here starts torch_xla: most of it is read once, when that starts, and some of it ends the process then.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from ppdsl.runtime.inspection.run import Check, Status
from ppdsl.units import counted

__all__ = ["BARRIER", "before_devices", "cpu_devices", "cpu_threads", "pjrt_device", "tpu_chips", "with_devices"]

BARRIER = "--xla_tpu_use_enhanced_launch_barrier"
"""With it a TPU starts a program when all devices of the program were given it; a stage runs on one alone."""

_TRY = "CPU_NUM_DEVICES=4 XLA_THREAD_POOL_SIZE=16"
_KINDS = ("CPU", "TPU")
_GOOGLE = "0x1ae0"
_WHOLE = {  # they change what every program is
    "XLA_USE_BF16": "all float32 are bfloat16, parameters too: use torch.autocast('xla', torch.bfloat16)",
    "XLA_DOWNCAST_BF16": "all float32 are bfloat16, parameters too: use torch.autocast('xla', torch.bfloat16)",
    "XLA_USE_32BIT_LONG": "int64 has 32 bits, on the devices alone",
    "XLA_USE_EAGER_DEBUG_MODE": "every operation is a program of its own",
    "XLA_SAVE_TENSORS_FILE": "every program is written to a file",
}
_TOPOLOGY = ("TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_WORKER_HOSTNAMES")
_ALIASING = "XLA_ENABLE_PARAM_ALIASING"
_IN_FLIGHT = "XLA_TPU_MAX_INFLIGHT_COMPUTATIONS"


def pjrt_device(chips: int) -> Check:
    """Look at PJRT_DEVICE, which says what kind of device is taken.

    Args:
        chips: TPU chips of this machine.

    >>> pjrt_device(chips=0).name
    'PJRT_DEVICE'
    """
    kind = os.environ.get("PJRT_DEVICE", "")
    if not kind:
        there = f"this machine has {counted(chips, 'TPU chip')}" if chips else "this machine shows no TPU chip"
        remedy = "set PJRT_DEVICE=TPU" if chips else f"set PJRT_DEVICE=TPU, or PJRT_DEVICE=CPU to try ({_TRY})"
        return Check("PJRT_DEVICE", Status.FAIL, f"not set; {there}", remedy)
    if kind not in _KINDS and kind.upper() in _KINDS:
        return Check("PJRT_DEVICE", Status.FAIL, f"{kind} is no kind of device", f"set PJRT_DEVICE={kind.upper()}")
    if kind not in _KINDS:
        return Check("PJRT_DEVICE", Status.WARN, f"{kind}, which ppdsl was never run on", "set it to TPU or CPU")
    if kind == "CPU" and chips:
        found = f"CPU, though this machine has {counted(chips, 'TPU chip')}"
        return Check("PJRT_DEVICE", Status.WARN, found, "set PJRT_DEVICE=TPU to use them")
    return Check("PJRT_DEVICE", Status.OK, kind)


def tpu_chips(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """Return how many accelerators of Google's are plugged in, about: a TPU is one of their PCI devices.

    Args:
        devices: Where the system lists its PCI devices.
    """
    found = 0
    for folder in devices.glob("*"):
        try:
            vendor, kind = ((folder / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:  # plugged out, or not for us to read
            continue
        # Their network cards (class 02) and disks (01) are in every machine of their cloud.
        found += vendor == _GOOGLE and not kind.startswith(("0x01", "0x02"))
    return found


def before_devices(kind: str) -> Iterator[Check]:
    """Yield what can be said before torch_xla starts; after a failure it should not be started.

    Args:
        kind: The value of PJRT_DEVICE.
    """
    if os.environ.get("XLA_USE_SPMD", "0") not in {"", "0"}:
        found = "set: the process shows one device"
        yield Check("XLA_USE_SPMD", Status.FAIL, found, "unset it; pp.xla.circular turns SPMD on itself")
    for name, what in _WHOLE.items():
        if os.environ.get(name, "0") not in {"", "0"}:
            effect, _, instead = what.partition(": ")
            remedy = f"unset it, and {instead}" if instead else "unset it unless you look for a fault"
            yield Check(name, Status.WARN, f"set: {effect}", remedy)
    if flags := os.environ.get("XLA_FLAGS", "").strip():
        yield Check("XLA_FLAGS", Status.OK, flags)
    if kind == "TPU":
        yield _libtpu()
    if kind == "CPU":
        for name, remedy in (
            ("CPU_NUM_DEVICES", "set it to the number of ranks"),
            ("XLA_THREAD_POOL_SIZE", "set it to the number of ranks or more"),
        ):
            told = os.environ.get(name, "")
            if told and not (told.isdigit() and int(told)):
                yield Check(name, Status.FAIL, f"{told} is no number above 0", remedy)


def _libtpu() -> Check:
    told = os.environ.get("TPU_LIBRARY_PATH")
    if told:
        if not Path(told).is_file():
            return Check("libtpu", Status.FAIL, f"TPU_LIBRARY_PATH is {told}, and no such file is there", "unset it")
        return Check("libtpu", Status.OK, f"{told}, from TPU_LIBRARY_PATH")
    if importlib.util.find_spec("libtpu") is None:
        return Check("libtpu", Status.FAIL, "not installed", "pip install 'torch_xla[tpu]==2.9.*'")
    try:
        return Check("libtpu", Status.OK, importlib.metadata.version("libtpu"))
    except importlib.metadata.PackageNotFoundError:  # it has had other names
        return Check("libtpu", Status.OK, "installed")


def cpu_devices() -> Check:
    """Look at CPU_NUM_DEVICES, without which there is one."""
    told = os.environ.get("CPU_NUM_DEVICES")
    remedy = "" if told else "set it to the number of ranks"
    return Check("CPU_NUM_DEVICES", Status.OK if told else Status.WARN, told or "not set", remedy)


def cpu_threads(count: int) -> Check:
    """Look at XLA_THREAD_POOL_SIZE: a collective occupies a thread for each device until all have come.

    Args:
        count: Devices that were found.
    """
    told, cores = os.environ.get("XLA_THREAD_POOL_SIZE"), os.cpu_count() or 1
    threads = int(told) if told and told.isdigit() else cores
    found = told or f"not set, so {cores}, the number of cores"
    if threads >= count:
        return Check("XLA_THREAD_POOL_SIZE", Status.OK, found)
    found = f"{found}: fewer than devices, which wait for each other in permute and collectives"
    return Check("XLA_THREAD_POOL_SIZE", Status.FAIL, found, f"set XLA_THREAD_POOL_SIZE={4 * count}")


def with_devices(kind: str) -> Iterator[Check]:
    """Yield what slows a kind of device down, and what torch_xla made of the variables of a TPU, which it adds some to.

    Args:
        kind: The value of PJRT_DEVICE.
    """
    if kind == "CPU" and os.environ.get(_ALIASING, "0") != "0":
        found = f"{os.environ[_ALIASING]}: a launch waits for the one before, as gradients are written in place"
        yield Check(_ALIASING, Status.WARN, found, "set it to 0, or leave it to ppdsl")
    if kind != "TPU":
        return
    yield _launching(os.environ.get("LIBTPU_INIT_ARGS", ""))
    waiting = os.environ.get(_IN_FLIGHT)
    yield Check(_IN_FLIGHT, Status.OK, waiting or "not set, so 32 programs of a device wait before the driver does")
    for name in _TOPOLOGY:
        if told := os.environ.get(name):
            yield Check(name, Status.OK, told)


def _launching(arguments: str) -> Check:
    name = "LIBTPU_INIT_ARGS"
    flags = [flag for flag in arguments.split() if flag.partition("=")[0] == BARRIER]
    if not flags:
        return Check(name, Status.WARN, f"does not mention {BARRIER}", f"add {BARRIER}=false")
    if flags[-1] == f"{BARRIER}=false":
        return Check(name, Status.OK, "the launch barrier is off")
    found = f"{flags[-1]}: a stage on one device would wait for the others"
    return Check(name, Status.FAIL, found, f"add {BARRIER}=false behind it")
