"""What a pipeline does, as plain data: what `pipe.explain()` returns and reports draw."""

from __future__ import annotations

from typing import Any

from ppdsl.plan.lifetimes import peak_activations
from ppdsl.plan.messages import Direction
from ppdsl.runtime.compiled import Compiled

__all__ = ["explain"]


def explain(compiled: Compiled) -> dict[str, Any]:
    """Return stages, ranks, schedule, edges, ties, bytes and warnings of a compiled recording."""
    graph, plan, placement = compiled.graph, compiled.plan, compiled.placement
    sends = plan.messages
    peaks = peak_activations(plan.schedule, graph)
    return {
        "model": graph.name,
        "schedule": {
            "name": plan.schedule.name,
            "microbatches": plan.schedule.microbatches,
            "rows": [[str(action) for action in row] for row in plan.schedule.rows],
        },
        "stages": [
            {
                "stage": stage.index,
                "label": stage.label,
                "rank": placement[stage.index],
                "modules": list(stage.modules),
                "operations": stage.operations,
                "parameters": list(stage.parameters),
                "buffers": list(stage.buffers),
                "parameter_bytes": stage.parameter_bytes,
                "flops": stage.flops,
                "backward": stage.has_backward,
                "loss": stage.index == graph.loss,
            }
            for stage in graph.stages
        ],
        "ranks": [
            {
                "rank": rank,
                "stages": [stage.index for stage in graph.stages if placement[stage.index] == rank],
                "sends": sum(message.source == rank for message in sends),
                "sent_bytes": sum(message.bytes for message in sends if message.source == rank),
                "live_activations": peaks[rank].count,
                "live_bytes": peaks[rank].bytes,
            }
            for rank in range(len(plan.rows))
        ],
        "edges": [
            {
                "edge": edge.index,
                "value": edge.value,
                "meta": str(edge.meta),
                "bytes": edge.bytes,
                "gradient": bool(edge.gradient_from),
                "producer": edge.producer,
                "consumers": list(edge.consumers),
                "messages": sum(m.edge == edge.index and m.direction is Direction.FORWARD for m in sends),
            }
            for edge in graph.edges
        ],
        "ties": [{"names": list(tie.names), "stages": list(tie.stages)} for tie in graph.ties],
        "inputs": [{"name": i.name, "meta": str(i.meta), "stages": list(i.consumers)} for i in graph.inputs],
        "bytes_per_step": sum(message.bytes for message in sends),
        "warnings": [*(warning.message for warning in graph.warnings), *_idle(compiled), *compiled.run_warnings],
    }


def _idle(compiled: Compiled) -> list[str]:
    idle = sorted(set(range(len(compiled.plan.rows))) - set(compiled.placement))
    if not idle:
        return []
    noun, verb = ("Rank", "has") if len(idle) == 1 else ("Ranks", "have")
    return [f"{noun} {', '.join(map(str, idle))} {verb} no stage."]
