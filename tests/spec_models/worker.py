"""What the processes of a distributed test run: `worker.py SCENARIO`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import ppdsl as pp
from ppdsl.diagnostics import PpdslError
from ppdsl.spec.load import load_spec_text
from tests.runtime.saying import keep_others_apart, say
from tests.spec_models.nets import made
from tests.spec_models.specs import CASES


def equal() -> None:
    """Every case has the loss of the same spec in one process, to the last bit."""
    for name, case in CASES.items():
        partition = load_spec_text(case.spec)
        count = partition.settings.microbatches
        given, targets = torch.cat([case.example()] * count), torch.cat([case.targets] * count)
        losses = []
        for runtime in (None, "inprocess"):
            pipe = pp.pipeline(
                made(case.kind), (case.example(),), targets=case.targets, loss=case.loss, spec=partition,
                runtime=runtime, timeout=30.0,
            )  # fmt: skip
            losses.append(pipe.step(given, targets=targets).loss)
            pipe.close()
        assert torch.equal(*losses), name
    say("equal")


def broken() -> None:
    """Specs with a mistake end with the same finding on every rank."""
    case = CASES["chain"]
    for spec in (
        "pipeline net { stage a @ 0 { embed, h[:2] } stage b @ 1 { norm, head } }",
        "pipeline net { stage a @ 0 { embed, h[:2] } stage b @ 1 { rest } expect stages == 3 }",
        "pipeline net { stage a @ 0 { embed } stage b @ 1 { h[:2] } stage c @ 2 { rest } }",
    ):
        refused(spec, case)


def alone() -> None:
    """Only rank 1 cannot read its spec: rank 0 does not wait for it."""
    case = CASES["tied"]
    path = Path(tempfile.gettempdir()) / f"no-such-spec-{dist.get_rank()}.ppspec"
    if dist.get_rank() == 0:
        path = Path(tempfile.mkdtemp()) / "net.ppspec"
        path.write_text(case.spec)
    refused(path, case)


def refused(spec: object, case: object) -> None:
    try:
        given = load_spec_text(spec, "net.ppspec") if isinstance(spec, str) else spec
        pp.pipeline(made(case.kind), (case.example(),), targets=case.targets, loss=case.loss, spec=given, timeout=30.0)
        say("it was built")
    except PpdslError as error:
        say(f"{type(error).__name__}: {error.diagnostics[0].code}: {error.diagnostics[0].message}")


def timed() -> None:
    """All ranks divide by the times of rank 0."""
    case = CASES["chain"]
    spec = "pipeline net { microbatches = 2 stage a @ 0 { embed } split h[*] into 2 by time as b[i] @ i "
    spec += "stage c @ 1 { norm, head } }"
    partition = load_spec_text(spec)
    pipe = pp.pipeline(made(case.kind), (case.example(),), targets=case.targets, loss=case.loss, spec=partition)
    given, targets = torch.cat([case.example()] * 2), torch.cat([case.targets] * 2)
    say(bool(pipe.step(given, targets=targets).loss.isfinite()))


if __name__ == "__main__":
    keep_others_apart()
    dist.init_process_group("gloo")
    for scenario in sys.argv[1:]:
        say(f"# {scenario}")
        globals()[scenario]()
    dist.barrier()
    dist.destroy_process_group()
