"""Specs of tests: statements, without the braces of a pipeline around them."""

from __future__ import annotations

from ppdsl.spec.load import load_spec_text
from ppdsl.spec.partition import Partition

__all__ = ["FILE", "read", "whole"]

FILE = "net.ppspec"


def whole(body: str) -> str:
    """Return a whole spec around some statements."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"pipeline net {{\n{lines}\n}}\n"


def read(body: str) -> Partition:
    """Return the partition that some statements declare."""
    return load_spec_text(whole(body), FILE)
