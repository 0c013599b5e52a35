"""What the processes of a test of ties run: `tie_worker.py SCENARIO ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import ppdsl as pp
from tests.runtime.saying import keep_others_apart, say
from tests.runtime.test_tie_traps import AdaptedLanguage, Recurrent
from tests.runtime.test_ties import Language, batch, made, piped, trained

PLACEMENT = {0: 0, 1: 1, 2: 2, 3: 1}


def on_three(model: nn.Module) -> pp.Pipeline:
    return piped(model, placement=PLACEMENT, timeout=20.0)


def attempt(run: Callable[[], object]) -> None:
    try:
        run()
    except pp.PpdslError as error:
        say(f"{type(error).__name__}: {error}")


def equal() -> None:
    """The copies are those of one process, and equal to each other to the last bit."""
    for kind in (Language, AdaptedLanguage, Recurrent):
        pipe = on_three(made(kind))
        trained(pipe, made(kind), 3)
        for tie in pipe.graph.ties:
            holders = sorted({PLACEMENT[stage] for stage in tie.stages})
            copies: list[object] = [None] * dist.get_world_size()
            dist.all_gather_object(copies, pipe.module.get_parameter(tie.names[0]).detach().numpy().tobytes())
            assert len({copies[rank] for rank in holders}) == 1, tie.names
        pipe.close()
    say("equal")


def meta() -> None:
    """Filled on meta, each rank has memory for its own part, and the tie is one object wherever both ends are."""
    whole = made(Language)
    with torch.device("meta"):
        model = Language().double()
    pipe = on_three(model)
    pp.materialize(pipe, whole.state_dict())
    assert model.head.weight is model.table.weight
    assert model.table.weight.is_meta == (dist.get_rank() == 2)
    trained(pipe, whole, 3)
    pipe.close()
    say("equal")


def beside() -> None:
    """A second pipeline over the same model, on the same ranks, sees what the first one has trained."""
    model, whole = made(Language), made(Language)
    training = on_three(model)
    x, y = batch()
    decoding = pp.pipeline(model, (x[:1],), microbatches=2, placement=PLACEMENT, timeout=20.0)
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.05) for one in (training, whole))
    for _ in range(3):
        training.step(x, targets=y)
        functional.cross_entropy(whole(x), y).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(decoding(x[:2]), whole(x[:2]).detach(), rtol=1e-9, atol=1e-11)
    decoding.close()
    training.close()
    say("equal")


def apart(optimizer_of: Callable[[pp.Pipeline], torch.optim.Optimizer], after: Callable[[nn.Module], None]) -> None:
    """Make a step that lets the copies go apart, and another one, which must not run."""
    model = made(Language)
    pipe = on_three(model)
    x, y = batch()
    pipe.step(x, targets=y)
    optimizer_of(pipe).step()
    after(model)
    attempt(lambda: pipe.step(x, targets=y))
    pipe.close()


def sgd(pipe: pp.Pipeline, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=lr)


def nothing(model: nn.Module) -> None:
    pass


def forgotten() -> None:
    """One rank does not step its optimizer."""
    apart(lambda pipe: sgd(pipe, 0.0 if dist.get_rank() == 1 else 0.1), nothing)


def groups() -> None:
    """One rank has the tied parameter in a group of other options."""

    def make(pipe: pp.Pipeline) -> torch.optim.Optimizer:
        quick = [p for name, p in pipe.named_parameters() if dist.get_rank() == 0 and "table" in name]
        slow = [p for name, p in pipe.named_parameters() if all(p is not other for other in quick)]
        return torch.optim.SGD([g for g in ({"params": quick, "lr": 0.2}, {"params": slow}) if g["params"]], lr=0.1)

    apart(make, nothing)


def refilled() -> None:
    """Every rank fills its own copy anew, from another seed, when the copies were made equal before."""

    def refill(model: nn.Module) -> None:
        torch.manual_seed(dist.get_rank())
        model.table.reset_parameters()

    apart(sgd, refill)


def lost() -> None:
    """One rank loses the tie; tied again, and with the owner's values loaded, all go on."""
    model, whole = made(Language), made(Language)
    pipe = on_three(model)
    x, y = batch()
    if dist.get_rank() == 1:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    attempt(lambda: pipe.step(x, targets=y))
    model.head.weight = model.table.weight
    torch.manual_seed(dist.get_rank())
    model.table.reset_parameters()
    pipe.load_state_dict(whole.state_dict())
    trained(pipe, whole, 2)
    pipe.close()
    say("equal")


if __name__ == "__main__":
    keep_others_apart()
    dist.init_process_group("gloo")
    for scenario in sys.argv[1:]:
        say(f"# {scenario}")
        globals()[scenario]()
    dist.barrier()
    dist.destroy_process_group()
