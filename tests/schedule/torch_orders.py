"""The orders of the installed torch; the one place of the tests that touches its private names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

__all__ = ["construct", "dumped", "known", "loaded", "single_rows", "torch_rows"]

schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="this torch has no pipelining")

_CLASSES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def construct(name: str, p: int, v: int, m: int) -> Any:
    """Return torch's schedule as rank 0 makes it: the orders of all ranks, and their lowering."""
    cls = getattr(schedules, _CLASSES[name], None)
    if cls is None:
        pytest.skip(f"this torch has no {_CLASSES[name]}")
    return cls([_stage(0, p, p * v) for _ in range(v)], m)


def torch_rows(name: str, p: int, v: int, m: int) -> list[list[str]]:
    """Return torch's compute-only order, idle steps left out."""
    order = getattr(construct(name, p, v, m), "pipeline_order", None)
    if order is None:
        pytest.skip("this torch keeps its order elsewhere")
    return [[str(action) for action in order[rank] if action is not None] for rank in range(p)]


def single_rows(name: str, p: int, m: int) -> list[list[str]]:
    """Return what GPipe and 1F1B do when they run: the calls of stages that only take notes.

    `Schedule1F1B._get_pipeline_order` is not what runs: it numbers the last rank's micro-batches from 1.
    """
    cls = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}[name]
    rows = []
    for rank in range(p):
        calls: list[str] = []
        stage = MagicMock(stage_index=rank, num_stages=p, is_first=rank == 0, is_last=rank == p - 1)
        stage.forward_one_chunk.side_effect = lambda mb, *_, c=calls, r=rank, **__: c.append(f"{r}F{mb}")
        stage.backward_one_chunk.side_effect = lambda mb, *_, c=calls, r=rank, **__: c.append(f"{r}B{mb}")
        for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, ops).return_value = []
        schedule = cls(stage, m)
        schedule._initialize_stage = lambda *_, **__: None
        schedule._step_microbatches([()] * m, [{}] * m)
        rows.append(calls)
    return rows


def dumped(name: str, p: int, v: int, m: int, path: Path, *, communications: bool) -> str:
    """Return what torch writes of its own schedule."""
    schedule = construct(name, p, v, m)
    if isinstance(schedule, schedules._PipelineScheduleRuntime):
        schedule._dump_csv(str(path), format="compute_comms" if communications else "compute_only")
    elif communications:
        pytest.skip("this torch does not lower this schedule")
    else:
        schedule._dump_csv(str(path))
    return path.read_text(encoding="utf-8")


def known(cells: list[str]) -> list[str]:
    """Return the cells that the installed torch knows; older ones reduce gradients without saying so."""
    return [cell for cell in cells if hasattr(schedules, "REDUCE_GRAD") or not cell.endswith("REDUCE_GRAD")]


def loaded(text: str, p: int, v: int, m: int, path: Path, *, communications: bool) -> list[list[str]]:
    """Return the rows that torch reads from a text, after its own validation."""
    stages = [_stage(0, p, p * v) for _ in range(v)]
    runtime = schedules._PipelineScheduleRuntime(stages, m)
    path.write_text(text, encoding="utf-8")
    runtime._load_csv(str(path), format="compute_comms" if communications else "compute_only")
    order = runtime.pipeline_order_with_comms if communications else runtime.pipeline_order
    return [[str(action) for action in order[rank]] for rank in range(p)]


def _stage(rank: int, p: int, stages: int) -> SimpleNamespace:
    return SimpleNamespace(
        group_size=p, group_rank=rank, num_stages=stages, stage_index=rank, submod=None, is_last=False, is_first=True
    )
