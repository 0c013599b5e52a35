"""What all tests share: hypothesis profiles, and the reasons to skip on a machine that lacks something."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Torch gives some warnings once in a process, so which test would see them depended on the order of tests.
torch.set_warn_always(True)

# deadline=None: the first example pays for imports and for the first call into torch.
settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("default"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Look for doctests in ppdsl only: what tests share is imported by the tests that use it."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the machine cannot run, and keep tests that start processes on one worker."""
    missing = {mark: reason for mark in ("current", "distributed", "gpu", "xla") if (reason := _why_not(mark, items))}
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
        # Two of them at once would be eight processes on two cores, and would measure each other.
        if item.get_closest_marker("distributed") is not None:
            item.add_marker(pytest.mark.xdist_group("distributed"))


def _why_not(mark: str, items: list[pytest.Item]) -> str | None:
    """Return why tests with `mark` cannot run here, or None when they can or none was collected."""
    if not any(item.get_closest_marker(mark) is not None for item in items):
        return None
    match mark:
        case "xla" if find_spec("torch_xla") is None:
            return "torch_xla is not installed: `make test` runs this on torch 2.9"
        case "xla" if "PJRT_DEVICE" not in os.environ:
            return "PJRT_DEVICE is not set: `make test` runs this in a process of its own"
        case "current" if torch.__version__ < (2, 10):
            return "takes long: `make test` runs this on the current torch"
        case "gpu" | "distributed":
            if mark == "gpu" and not torch.cuda.is_available():
                return "no CUDA device"
            if mark == "distributed" and not torch.distributed.is_available():
                return "this torch is built without torch.distributed"
    return None
