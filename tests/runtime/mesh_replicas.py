"""Replicas: what they train, what they keep apart, what they save."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ppdsl as pp
from tests.runtime.mesh_common import HALVES, adamw, attempt, folder, meshes, place, train_beside, train_on, train_whole
from tests.runtime.mesh_models import (
    ROWS,
    TIGHT,
    assert_trained_alike,
    batch,
    cross_entropy,
    made,
    piped,
    share,
    summed,
)
from tests.runtime.saying import say


def training() -> None:
    """Every layout, schedule and number of micro-batches trains like the plain model on the whole batch."""
    for number, (name, mesh) in enumerate(meshes().items()):
        _, replica = place(mesh)
        for schedule, microbatches in (("1f1b", 2), ("zbv", 5), ("zbv", 1))[: 3 - (number > 0)]:
            what = f"{name}, {schedule}, {microbatches}"
            whole, model = made(), made(5 + replica)
            placement = HALVES if schedule == "1f1b" else None
            pipe = piped(model, microbatches, schedule=schedule, placement=placement, mesh=mesh)
            ours = torch.optim.AdamW(pipe.parameters(), lr=0.05)
            theirs = torch.optim.AdamW(whole.parameters(), lr=0.05)
            train_beside(pipe, whole, (ours, theirs), 2 * microbatches * ROWS, replica, what)
            pipe.close()
    say("equal")


def reductions() -> None:
    """A sum goes over all replicas, and a mean over tokens over those of all of them, however unequal their shares."""
    mesh = {"dp": 2, "pp": 2}
    _, replica = place(mesh)
    tokens, words = batch(0, 4 * ROWS)
    for ignored in (0, 5, 2 * ROWS * 3):
        words.view(-1)[:ignored] = -100
        mine = share((tokens, words), replica, 2)
        for loss, reduction in (
            (summed, "sum"),
            (cross_entropy, "token_mean"),
            (summed, pp.TokenMean(of="sum")),
            (summed, lambda part, _: 2.0),
        ):
            whole, model = made(), made()
            expected = (summed if reduction == "sum" or callable(reduction) else cross_entropy)(whole(tokens), words)
            pipe = piped(model, 2, loss, placement=HALVES, mesh=mesh, reduction=reduction)
            expected.backward()
            torch.testing.assert_close(pipe.step(mine[0], targets=mine[1]).loss, expected.detach(), **TIGHT)
            assert_trained_alike(pipe, whole, f"{reduction}, {ignored} ignored")
            pipe.close()
    say("equal")


def accumulating() -> None:
    """Steps with and without the mean over replicas, in any order, add up to one batch."""
    mesh = {"dp": 2, "pp": 2}
    _, replica = place(mesh)
    for pattern in ([False, True], [True, True], [True, False, False, True], [True, False, True, True]):
        whole, model = made(), made()
        pipe = piped(model, 2, schedule="zbv", mesh=mesh)
        for step, reduce in enumerate(pattern):
            tokens, words = batch(step, 4 * ROWS)
            mine = share((tokens, words), replica, 2)
            pipe.step(mine[0], targets=mine[1], reduce=reduce)
            cross_entropy(whole(tokens), words).backward()
            assert pipe._world.replicas.pending is not reduce
        assert_trained_alike(pipe, whole, f"{pattern}")
        pipe.step(mine[0], targets=mine[1], reduce=False)
        attempt(lambda pipe=pipe: pipe.clip_grad_norm_(1.0))
        pipe.close()
    say("equal")


def unequal() -> None:
    """Replicas whose shares have other sizes count by their rows."""
    mesh = {"dp": 2, "pp": 2}
    _, replica = place(mesh)
    axes = {"tokens": 0, "targets[0]": 0}
    whole = made()
    pipe = piped(made(), 2, placement=HALVES, mesh=mesh, batch_axis=axes)
    tokens, words = batch(0, 9)
    mine = slice(0, 5) if replica == 0 else slice(5, 9)
    result = pipe.step(tokens[mine], targets=words[mine])
    loss = cross_entropy(whole(tokens), words)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach(), **TIGHT)
    assert_trained_alike(pipe, whole, "unequal")
    say(f"{result.counted} rows")


def once() -> None:
    """Every stage is reduced once in a step, as soon as its gradients are complete, whatever the micro-batches."""
    mesh, ties = {"dp": 2, "pp": 2}, {"table.weight", "gain"}
    _, replica = place(mesh)
    for schedule in ("1f1b", "zbv", "gpipe"):
        for microbatches in (1, 2, 5):
            placement = HALVES if schedule != "zbv" else None
            pipe = piped(made(), microbatches, schedule=schedule, placement=placement, mesh=mesh)
            names = {id(parameter): name for name, parameter in pipe.named_parameters()}
            notes = Notes(pipe, names)
            tokens, words = share(batch(0, 2 * microbatches * ROWS), replica, 2)
            for _ in range(2):
                notes.sent.clear()
                pipe.step(tokens, targets=words)
                flat = [name for _, group in notes.sent for name in group]
                assert len(flat) == len(set(flat)), notes.sent
                assert set(flat) | ties == set(names.values()) | ties, notes.sent
                # Before the rank has come to the end of its list, except for those that other stages use, too.
                assert all(running == ties.isdisjoint(group) for running, group in notes.sent if group), notes.sent
            pipe.close()
    say("once")


class Notes:
    """Writes down which gradients a rank sends to its replicas, and whether it still runs its list."""

    def __init__(self, pipe: pp.Pipeline, names: dict[int, str]) -> None:
        self.sent: list[tuple[bool, tuple[str, ...]]] = []
        self._names = names
        self._running = False
        world: Any = pipe._world
        self._start, self._run = world.replicas.start, world.run
        world.replicas.start, world.run = self.start, self.run

    def start(self, parameters: Any) -> None:
        self.sent.append((self._running, tuple(self._names[id(parameter)] for parameter in parameters)))
        self._start(parameters)

    def run(self, executors: Any) -> None:
        self._running = True
        self._run(executors)
        self._running = False


def apart() -> None:
    """Replicas keep to themselves: no value of one is seen in the other, outputs and times are a pipeline's own."""
    for mesh in meshes().values():
        rank, replica = place(mesh)
        pipe = piped(made(), 2, placement=HALVES, mesh=mesh)
        tokens, words = batch(replica, 2 * ROWS)
        result = pipe.step(tokens, targets=words, outputs="all", timeline=True)
        torch.testing.assert_close(result.outputs, made()(tokens).detach(), **TIGHT)
        assert len(result.timeline.events) == 16, result.timeline.events
        assert result.timeline.ranks == 2
        assert sorted(pipe.full_state_dict()) == sorted(made().state_dict())
        say(f"{rank} of {replica}: {', '.join(name for name, _ in pipe.named_parameters())}")
        pipe.close()


def keeping() -> None:
    """What one pipeline of four ranks has saved goes on in two replicas of two ranks, and the other way round."""
    whole = made()
    theirs = adamw(whole)
    four = piped(made(), 4)
    train_on(four, adamw(four), range(2), folder() / "four", 0, 1)
    train_whole(whole, theirs, range(2))
    mesh = {"pp": 2, "dp": 2}
    _, replica = place(mesh)
    two = piped(made(9 + replica), 2, placement=HALVES, mesh=mesh)
    optimizer = adamw(two)
    found = pp.load(two, folder() / "four", optimizer)
    assert (found.steps, found.ranks) == (2, 4)
    train_on(two, optimizer, range(2, 4), folder() / "two", replica, 2)
    train_whole(whole, theirs, range(2, 4))
    assert_trained_alike(two, whole, "resumed with replicas")
    again = piped(made(20), 4)
    ours = adamw(again)
    pp.load(again, folder() / "two", ours)
    train_on(again, ours, range(4, 6), folder() / "six", 0, 1)
    train_whole(whole, theirs, range(4, 6))
    assert_trained_alike(again, whole, "resumed without replicas")
    pp.export_safetensors(two, folder() / "two.safetensors")
    pp.export_safetensors(two, folder() / "parts")
    handle = pp.save(two, folder() / "background", optimizer, asynchronous=True)
    say(handle.wait().name)


def by_spec() -> None:
    """A spec asks for replicas; it is the caller who decides."""
    path = folder() / "talk.ppspec"
    if dist.get_rank() == 0:
        path.write_text(
            "pipeline talk {\n    schedule     = 1f1b\n    microbatches = 2\n    mesh { dp = 2, pp = 2 }\n\n"
            "    stage first @ 0 { table, a }\n    stage second @ 1 { b, norm, rest }\n}\n"
        )
    dist.barrier()
    replica = dist.get_rank() // 2
    whole, model = made(), made()
    tokens, words = batch(0, 4 * ROWS)
    mine = share((tokens, words), replica, 2)
    pipe = pp.pipeline(model, (tokens[:ROWS],), targets=words[:ROWS], loss=cross_entropy, spec=path, timeout=20.0)
    loss = pipe.step(mine[0], targets=mine[1]).loss
    expected = cross_entropy(whole(tokens), words)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **TIGHT)
    assert_trained_alike(pipe, whole, "by spec")
    say(pipe)
