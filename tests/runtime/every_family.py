"""Every schedule on every shape of model, compared with the plain loop."""

from __future__ import annotations

import torch
from torch import nn

import ppdsl as pp
from ppdsl.schedule import families
from ppdsl.schedule.arrangement import Arrangement
from tests.runtime.shapes import SHAPES, Shape

VARIANTS = {
    "zero_bubble": ("zero_bubble(h1)", "zero_bubble(h2)"),
    "looped_bfs": ("looped_bfs", "looped_bfs(backward=fifo)"),
}
SCHEDULES = tuple(name for f in families().values() if f.backward for name in VARIANTS.get(f.name, (f.name,)))


def options_for(schedule: str, stages: int, ranks: int) -> dict[str, object]:
    """Return what to say of a schedule: families without a rule do not choose who shares a rank."""
    if schedule == "auto":
        return {"schedule": schedule}
    family = families()[schedule.partition("(")[0]]
    given = family.arrangement is Arrangement.GIVEN and stages > ranks
    return {"schedule": schedule, "placement": {key: key % ranks for key in range(stages)} if given else None}


def differences(shape: Shape, pipe: pp.Pipeline, reference: tuple, microbatches: int) -> list[str]:
    """Make a step and return what is not as in the plain loop; parameters and buffers of this rank only."""
    plain, loss, output = reference
    inputs, target = shape.batch(microbatches)
    result = pipe.step(*inputs, targets=target, outputs="all")
    wrong = [] if torch.equal(result.loss, loss) else ["loss"]
    wrong += [] if torch.equal(result.outputs, output) else ["output"]
    for name, parameter in pipe.named_parameters():
        expected = plain.get_parameter(name).grad
        if parameter.grad is None or not torch.allclose(parameter.grad, expected, rtol=1e-10, atol=1e-12):
            wrong.append(name)
    buffers = dict(plain.named_buffers())
    state = pipe.state_dict()
    wrong += [name for name, buffer in buffers.items() if name in state and not torch.equal(state[name], buffer)]
    return wrong


def evaluates_wrongly(shape: Shape, pipe: pp.Pipeline, plain: nn.Module, microbatches: int) -> bool:
    """Whether the model's own output differs from the plain one, in evaluation on the same placement."""
    inputs, _ = shape.batch(microbatches)
    pipe.module.eval()
    plain.eval()
    with torch.no_grad():
        expected = plain(*inputs)
    return not torch.allclose(pipe(*inputs), expected, rtol=1e-10, atol=1e-12)


def run_all(stages: int, ranks: int, microbatches: int, **more: object) -> list[str]:
    """Return what went wrong, in a line for each schedule and shape; nothing at best."""
    lines = []
    for name, shape in SHAPES.items():
        reference = shape.plain(stages, microbatches)
        for schedule in (*SCHEDULES, "auto"):
            model = shape.model(stages)
            try:
                options = {**options_for(schedule, stages, ranks), **more}
                pipe = shape.pipeline(model, microbatches, **options)
                wrong = differences(shape, pipe, reference, microbatches)
                used = len(pipe.plan.rows)
                pipe.close()
            except pp.PpdslError as error:
                wrong, used = [str(error)], ranks
            if used != ranks:
                wrong.append(f"{used} ranks")
            if wrong:
                lines.append(f"{schedule} on {name}: {', '.join(wrong)}")
    return lines
