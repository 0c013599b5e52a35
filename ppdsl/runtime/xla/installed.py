"""Which torch_xla is installed, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

__all__ = ["is_installed", "versions"]


def is_installed() -> bool:
    """Whether torch_xla can be imported; does not import it."""
    return importlib.util.find_spec("torch_xla") is not None


def versions() -> tuple[str, str]:
    """Return the installed versions of torch and torch_xla; the second one is empty when it is missing."""
    try:
        return torch.__version__, importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return torch.__version__, ""
