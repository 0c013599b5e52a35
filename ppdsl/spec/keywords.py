"""The words of the language that are not grammar, and which of them have an effect today.

This is the one place to change when an option or a setting gains its effect.
"""

from __future__ import annotations

__all__ = [
    "ARGUMENT_WORDS", "BALANCES", "COUNT_UNITS", "DEVICES", "ITEM_WORDS", "LOSSES", "MEASURES", "NOT_SUPPORTED",
    "OPTIONS", "OTHER_WORDS", "POLICIES", "SCHEDULES", "SETTINGS", "SIZE_UNITS",
]  # fmt: skip

ITEM_WORDS = (
    "pipeline", "param", "let", "include", "stage", "split", "cut", "weight", "nosplit", "replicate", "tie", "expect",
)  # fmt: skip
"""Words that an item begins with."""

OTHER_WORDS = (
    "ppspec", "in", "into", "by", "as", "with", "before", "after", "at", "for", "rank", "order", "edges", "sync",
    "colocate", "type", "call", "rest",
)  # fmt: skip
"""All other words of the grammar."""

SETTINGS = ("schedule", "microbatches", "ranks", "memory", "batch_axis", "loss", "device", "mesh")
OPTIONS = ("memory", "recompute", "dtype", "compile", "freeze")
BALANCES = ("count", "params", "flops", "time", "file")
LOSSES = ("mean", "sum", "token_mean")
DEVICES = ("cpu", "cuda", "xla")
POLICIES = ("sync", "colocate")
ARGUMENT_WORDS = ("none", "full", "true", "false")

MEASURES = {
    "imbalance": "number", "bubble": "share", "memory": "bytes", "params": "count", "flops": "count",
    "stages": "number", "ranks": "number", "messages": "number",
}  # fmt: skip
"""What an expectation measures, and the kind of its bound. `edges` has a form of its own."""

STAGE_MEASURES = ("memory", "params", "flops")
"""Measures of one stage: `expect memory(head) <= 40GiB`."""

SCHEDULES = (
    "1f1b", "eager_1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zero_bubble", "interleaved_zero_bubble", "zbv",
    "v_half", "v_min", "dualpipev", "sequential", "forward_only", "auto",
)  # fmt: skip
"""Names of schedules. The families are above this package; a test holds the two lists together."""

SIZE_UNITS = {
    "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9,
    "TB": 10**12,
}  # fmt: skip
COUNT_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}

NOT_SUPPORTED: dict[tuple[str, str], str] = {
    ("recompute", "modules"): "a stage is recomputed as a whole",
    ("option", "dtype"): "a type for each stage has no effect yet",
    ("placement", "several"): "replicated stages have no effect yet",
}
"""What the language can say and nothing obeys yet: refused, never ignored."""
