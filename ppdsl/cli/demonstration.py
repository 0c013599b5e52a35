"""`ppdsl demo`: train a marked model in this process, then draw its stages and its step."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ppdsl.cli.arguments import add_width, number_from_one
from ppdsl.cli.measuring import MEASURED_STEPS, TURNS, Measured, compare_steps
from ppdsl.cli.output import Exit, Output
from ppdsl.cli.schedules import own_order
from ppdsl.diagnostics import Diagnostic
from ppdsl.report.graph import render_dag
from ppdsl.report.palette import AXIS, LABEL, TITLE
from ppdsl.report.timeline import render_comparison
from ppdsl.timeline import Timeline

if TYPE_CHECKING:
    from ppdsl.runtime.pipeline import Pipeline

__all__ = ["add_arguments", "run_demo"]

LEARNING_RATE = 3e-3
_IMAGES = 4  # in a micro-batch
_LINES = 6


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `ppdsl demo`."""
    parser.add_argument("--steps", type=number_from_one, default=30, help="optimizer steps (default: 30)")
    parser.add_argument("--schedule", default="1f1b", help="schedule family or CSV file (default: 1f1b)")
    parser.add_argument("--microbatches", type=number_from_one, default=8, help="micro-batches in a step (default: 8)")
    add_width(parser)


def run_demo(options: Namespace, output: Output) -> Exit:
    """Train, say how the loss falls, draw."""
    losses, measured = _train(options, output)
    width, plain = output.width, output.ascii_only
    schedule, graph = measured.schedule, measured.graph
    title = f"One step, {schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} micro-batches"
    output.results.print()
    output.show(
        Text("The stages, and what goes between them in one micro-batch", style=TITLE),
        render_dag(graph, width=width, placement=schedule.placement, ascii_only=plain),
        render_comparison(measured.predicted, measured.timeline, width=width, title=title, ascii_only=plain),
    )
    output.note(TURNS)
    if losses[-1] < losses[0]:
        return Exit.FINE
    message = f"The loss did not fall: {losses[0]:.4f} at step 1, {losses[-1]:.4f} at step {len(losses)}."
    output.report([Diagnostic("loss-did-not-fall", message, help="train for more steps: ppdsl demo --steps 30")])
    return Exit.FINDINGS


def _train(options: Namespace, output: Output) -> tuple[list[float], Measured]:
    with output.busy("importing torch and recording the model"):
        import torch

        pipe = _pipeline(options)
    schedule = pipe.plan.schedule
    output.show(
        Text.assemble(
            ("A small U-Net learns to remove noise", TITLE),
            f": {len(pipe.graph.stages)} stages, {schedule.ranks} ranks in one process",
        )
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for kernels as small as these more threads are slower, and each rank would have its own
    try:
        return _train_steps(pipe, max(options.steps, 2), output)
    finally:
        torch.set_num_threads(threads)


def _pipeline(options: Namespace) -> Pipeline:
    from ppdsl.demo import make
    from ppdsl.runtime.pipeline import pipeline

    order = own_order(options.schedule)
    count = options.microbatches if order is None else order.microbatches
    return pipeline(**make(_IMAGES), schedule=order or options.schedule, microbatches=count)


def _train_steps(pipe: Pipeline, steps: int, output: Output) -> tuple[list[float], Measured]:
    import torch

    from ppdsl.demo import noisy_blobs

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)
    chance = torch.Generator().manual_seed(1)
    images = _IMAGES * pipe.plan.schedule.microbatches
    losses: list[float] = []
    timelines: list[Timeline] = []
    with _progress(output, steps) as advance:
        for step in range(1, steps + 1):
            noisy, clean = noisy_blobs(images, chance)
            result = pipe.step(noisy, targets=clean, timeline=step > steps - MEASURED_STEPS)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(math.nan if result.loss is None else result.loss.item())
            timelines += [result.timeline] if result.timeline is not None else []
            advance(step, losses[-1])
    return losses, compare_steps(pipe.plan, timelines)


@contextmanager
def _progress(output: Output, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Yield a function that is told each step's loss; it prints some of them, and moves a bar on a terminal."""
    chosen = {1, steps, *(round(steps * i / (_LINES - 1)) for i in range(1, _LINES))}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=output.results, transient=True, disable=not output.results.is_terminal)
    with bar:
        task = bar.add_task("training", total=steps)

        def advance(step: int, loss: float) -> None:
            bar.advance(task)
            if step in chosen:
                bar.console.print(
                    Text.assemble((f"  step {step:>{len(str(steps))}}  loss ", AXIS), (f"{loss:.4f}", LABEL))
                )

        yield advance
