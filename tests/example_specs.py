"""The example specs with their models: trains a step under a spec and in the plain loop, and says how far they differ.

`example_specs.py FOLDER SPEC=RANKS...` is what the processes of a launch run; each writes the losses of two steps to a
file of its own.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ppdsl as pp

__all__ = ["FOLDER", "LANGUAGE", "VISION", "gradient_differences", "losses_of", "make", "model_argument", "spec_of"]

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "specs"
LANGUAGE = ("gpt2", "llama", "mixtral", "bert", "t5", "vit", "whisper", "clip", "mamba")
VISION = ("resnet50", "convnext", "hrnet", "densenet")


def spec_of(name: str) -> Path:
    """Return the path of a spec."""
    return FOLDER / f"{name}.ppspec"


def model_argument(name: str) -> str:
    """Return what to write behind `--model`."""
    return f"{FOLDER / ('language.py' if name in LANGUAGE else 'vision.py')}:{name}"


@cache
def _makers(file: str) -> dict[str, Any]:
    if file == "vision.py":
        import tests.zoo.vision  # noqa: F401 - lets torchvision import where its compiled part does not load
    return runpy.run_path(str(FOLDER / file))


def make(name: str, **options: Any) -> dict[str, Any]:
    """Return a model with one micro-batch of arguments."""
    made: dict[str, Any] = _makers("language.py" if name in LANGUAGE else "vision.py")[name](**options)
    return made


def _pipe(name: str, made: dict[str, Any], **options: Any) -> pp.Pipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PpdslWarning)
        return pp.pipeline(
            made["model"], made["args"], made.get("kwargs", {}), targets=made.get("targets"), loss=made.get("loss"),
            spec=spec_of(name), **options,
        )  # fmt: skip


def _batch(name: str, pipe: pp.Pipeline) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a whole batch, and the micro-batches it is cut into."""
    rows = _rows(make(name))
    whole = make(name, rows=rows * pipe.schedule.microbatches)
    parts = []
    for number in range(pipe.schedule.microbatches):

        def cut(value: Any, start: int = number * rows) -> Any:
            is_cut = isinstance(value, torch.Tensor) and value.dim() > 0
            return value[start : start + rows] if is_cut else value

        parts.append(
            {
                "args": tuple(map(cut, whole["args"])),
                "kwargs": {key: cut(value) for key, value in whole.get("kwargs", {}).items()},
                "targets": tuple(map(cut, whole.get("targets", ()))),
            }
        )
    return whole, parts


def _rows(made: dict[str, Any]) -> int:
    tensors = [*made["args"], *made.get("kwargs", {}).values()]
    return next(len(t) for t in tensors if isinstance(t, torch.Tensor) and t.dim() > 0)


def gradient_differences(name: str) -> list[str]:
    """Train a step under the spec in this process and in the plain loop; return what differs, in words."""
    made, plain = make(name), make(name)
    pipe = _pipe(name, made)
    whole, parts = _batch(name, pipe)
    result = pipe.step(*whole["args"], targets=whole.get("targets"), **whole.get("kwargs", {}))
    total = torch.zeros(())
    for part in parts:
        output = plain["model"](*part["args"], **part["kwargs"])
        loss = plain["loss"](output, *part["targets"]) if "loss" in plain else output.loss
        (loss / len(parts)).backward()
        total = total + loss.detach() * (1 / len(parts))  # as precise as the model's own loss is
    ours, wanted = float(result.loss), float(total)
    found = [] if abs(ours - wanted) <= 1e-10 * abs(wanted) else [f"loss {ours}, not {wanted}"]
    theirs = dict(plain["model"].named_parameters())
    count = 0
    for key, parameter in made["model"].named_parameters():
        ours, other = parameter.grad, theirs[key].grad
        if ours is None or other is None:
            found += [] if ours is other else [f"gradient of {key} is None in one of them"]
            continue
        count += 1
        apart, scale = float((ours - other).abs().max()), float(other.abs().max())
        if apart > 1e-10 * max(scale, 1.0):
            found.append(f"gradient of {key} is off by {apart:.3g} of {scale:.3g}")
    pipe.close()
    return found if count else ["no gradient was compared"]


def losses_of(name: str, ranks: int | None = None, **options: Any) -> list[float]:
    """Train two steps under the spec, for that many ranks, and return the losses."""
    params = {} if ranks is None else {"ranks": ranks}
    made = make(name)
    pipe = _pipe(name, made, spec_params=params, **options)
    whole, _ = _batch(name, pipe)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(float(pipe.step(*whole["args"], targets=whole.get("targets"), **whole.get("kwargs", {})).loss))
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()
    return losses


def main() -> None:
    """Run as one of several processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    said = []
    for name in sys.argv[2:]:
        name, _, ranks = name.partition("=")
        said.append(f"{name} {' '.join(map(repr, losses_of(name, int(ranks) if ranks else None, timeout=60.0)))}")
    Path(sys.argv[1], str(dist.get_rank())).write_text("\n".join(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
