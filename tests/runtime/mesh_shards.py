"""Sharded stages, tensor-parallel modules, and what goes with them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import ppdsl as pp
from tests.runtime.mesh_common import HALVES, adamw, attempt, folder, place, train_beside, train_on, train_whole
from tests.runtime.mesh_models import (
    ROWS,
    TIGHT,
    assert_trained_alike,
    batch,
    cross_entropy,
    made,
    piped,
    share,
    tall,
)
from tests.runtime.saying import say


def spread() -> None:
    """Sharded stages train like the plain model, whatever the schedule, and gather as often as planned."""
    for mesh, schedule, microbatches, again in (
        ({"dp": 2, "pp": 2}, "1f1b", 2, False),
        ({"pp": 2, "dp": 2}, "zbv", 5, False),
        ({"dp": 2, "pp": 2}, "zbv", 3, True),
        ({"pp": 2, "dp": 2}, "1f1b", 2, True),
    ):
        _, replica = place(mesh)
        whole, model = made(), made(5 + replica)
        placement = HALVES if schedule == "1f1b" else None
        pipe = piped(model, microbatches, schedule=schedule, placement=placement, mesh=mesh)
        assert pp.fully_shard(pipe, reshard_after_forward=again) is pipe
        counts = train_beside(pipe, whole, (adamw(pipe), adamw(whole)), 2 * microbatches * ROWS, replica, schedule)
        gathered, scattered = counts["_allgather_base_"], counts["_reduce_scatter_base_"]
        say(f"{schedule}, {microbatches}, {again}: {gathered} gathered, {scattered} scattered")
        for name, value in pipe.full_state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name], **TIGHT)
        pipe.close()
    say("equal")


def wide() -> None:
    """Four replicas of a pipeline of one rank: shards of unequal sizes, empty ones too, and every norm."""
    mesh, replica = {"dp": 4}, dist.get_rank()
    for sharded in (False, True):
        whole = made()
        pipe = piped(made(5 + replica), 2, placement=dict.fromkeys(range(4), 0), mesh=mesh)
        if sharded:
            pp.fully_shard(pipe)
        ours, theirs = adamw(pipe), adamw(whole)
        for step, norm_type in enumerate((2.0, 1.0, float("inf"))):
            tokens, words = batch(step, 8 * ROWS)
            mine = share((tokens, words), replica, 4)
            loss = pipe.step(mine[0], targets=mine[1]).loss
            expected = cross_entropy(whole(tokens), words)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach(), **TIGHT)
            norm = clip_grad_norm_(whole.parameters(), 0.1, norm_type)
            torch.testing.assert_close(pipe.clip_grad_norm_(0.1, norm_type), norm, **TIGHT)
            assert_trained_alike(pipe, whole, f"{sharded}, step {step}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        pipe.close()
    say("equal")


def kinds() -> None:
    """Gradients of half precision and of complex numbers are added as they are."""
    mesh, replica = {"dp": 2, "pp": 2}, dist.get_rank() // 2
    whole, model = Kinds(), Kinds()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
    pipe = pp.pipeline(model, (x[:2],), microbatches=2, placement={0: 0, 1: 1}, timeout=20.0, mesh=mesh)
    pipe.step(x.chunk(2)[replica])
    for part in x.chunk(4):
        (whole(part) / 4).backward()
    for name, parameter in pipe.named_parameters():
        theirs = whole.get_parameter(name).grad
        rough = {"rtol": 2e-2, "atol": 2e-3} if parameter.dtype in (torch.bfloat16, torch.float16) else {}
        torch.testing.assert_close(parameter.grad, theirs, **rough)
    say(", ".join(f"{name} {parameter.dtype}" for name, parameter in pipe.named_parameters()))


class Kinds(torch.nn.Module):
    """Parameters of several element types, one of them without gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.narrow = torch.nn.Parameter(torch.randn(4, 4).bfloat16())
        self.short = torch.nn.Parameter(torch.randn(4).half())
        self.turn = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.idle = torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        with pp.stage(0):
            x = (x.bfloat16() @ self.narrow).float() + self.idle.detach()
        with pp.stage(1):
            return (torch.view_as_real(x * self.turn).sum(-1) * self.short.float()).square().mean()


def combined() -> None:
    """Replicas and shards with recomputation, and with compiled stages."""
    mesh = {"dp": 2, "pp": 2}
    _, replica = place(mesh)
    compiled = {key: {"backend": "aot_eager"} for key in range(1, 3)}
    for name, value, sharded in (
        ("recompute", True, None),
        ("recompute", True, True),
        ("compile", compiled, None),
        ("compile", compiled, False),
    ):
        whole = made()
        pipe = piped(made(), 2, placement=HALVES, mesh=mesh, timeout=60.0, **{name: value})
        if sharded is not None:
            pp.fully_shard(pipe, reshard_after_forward=sharded)
        ours, theirs = adamw(pipe), adamw(whole)
        for step in range(2):
            tokens, words = batch(step, 4 * ROWS)
            mine = share((tokens, words), replica, 2)
            pipe.step(mine[0], targets=mine[1])
            cross_entropy(whole(tokens), words).backward()
            assert_trained_alike(pipe, whole, f"{name}, {sharded}, step {step}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        pipe.close()
    say("equal")


def keeping_shards() -> None:
    """Shards are saved once, and go on whole, and whole tensors go on as shards."""
    whole = made()
    theirs = adamw(whole)
    mesh = {"dp": 2, "pp": 2}
    _, replica = place(mesh)
    pipe = pp.fully_shard(piped(made(), 2, placement=HALVES, mesh=mesh))
    train_on(pipe, adamw(pipe), range(2), folder() / "shards", replica, 2)
    train_whole(whole, theirs, range(2))
    assert_trained_alike(pipe, whole, "sharded")
    four = piped(made(9), 4)
    ours = adamw(four)
    pp.load(four, folder() / "shards", ours)
    train_on(four, ours, range(2, 4), folder() / "unsharded", 0, 1)
    train_whole(whole, theirs, range(2, 4))
    assert_trained_alike(four, whole, "whole again")
    again = pp.fully_shard(piped(made(10 + replica), 2, schedule="zbv", mesh={"pp": 2, "dp": 2}))
    _, replica = place({"pp": 2, "dp": 2})
    ours = adamw(again)
    pp.load(again, folder() / "unsharded", ours)
    train_on(again, ours, range(4, 6), folder() / "six", replica, 2)
    train_whole(whole, theirs, range(4, 6))
    assert_trained_alike(again, whole, "shards again")
    state = again.full_state_dict()
    pp.export_safetensors(again, folder() / "shards.safetensors")
    pp.export_safetensors(again, folder() / "shards")
    for fill in (
        lambda: pipe.load_state_dict(state),
        lambda: pp.materialize(pipe, folder() / "shards.safetensors"),
        lambda: pp.materialize(pipe, folder() / "shards"),
        lambda: pp.materialize(pipe, state),
    ):
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()
        fill()
        tokens, words = share(batch(7, 4 * ROWS), place(mesh)[1], 2)
        pipe.step(tokens, targets=words)
        for name, value in pipe.full_state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=0.0, atol=0.0)
    handle = pp.save(pipe, folder() / "background", asynchronous=True)
    say(handle.wait().name)


def modes() -> None:
    """Sharded or not: freezing, thawing, evaluation, and steps that only add up, as in the plain model."""
    for sharded in (False, True):
        mesh = {"dp": 2, "pp": 2}
        _, replica = place(mesh)
        whole = made()
        pipe = piped(made(), 2, schedule="zbv", mesh=mesh)
        if sharded:
            pp.fully_shard(pipe)
        ours, theirs = torch.optim.SGD(pipe.parameters(), lr=0.1), torch.optim.SGD(whole.parameters(), lr=0.1)
        for step, (frozen, reduce, training) in enumerate(
            ((True, True, True), (True, True, False), (False, False, True), (False, True, True), (True, True, True))
        ):
            for target in (pipe.module, whole):
                target.train(training)
                for parameter in target.a.parameters():
                    parameter.requires_grad_(not frozen)
            tokens, words = batch(step, 4 * ROWS)
            mine = share((tokens, words), replica, 2)
            pipe.step(mine[0], targets=mine[1], reduce=reduce)
            cross_entropy(whole(tokens), words).backward()
            if reduce:
                assert_trained_alike(pipe, whole, f"{sharded}, step {step}")
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
            expected = cross_entropy(whole(tokens), words).detach()
            torch.testing.assert_close(pipe.evaluate(mine[0], targets=mine[1]).loss, expected, **TIGHT)
        pipe.close()
    say("equal")


def peers() -> None:
    """Tensor-parallel modules inside stages train like the plain model, beside other ranks and beside replicas."""
    for names in (("pp", "tp"), ("dp", "tp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        replicas, replica = (2, mesh["dp"].get_local_rank()) if "dp" in names else (1, 0)
        if "pp" not in names:
            mesh = DeviceMesh("cpu", mesh.mesh.unsqueeze(0), mesh_dim_names=("pp", *names))
        model, whole = tall(), tall()
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).double().chunk(2)
        mine = share((x, y), replica, replicas)
        placement = None if "pp" in names else {0: 0, 1: 0}
        pipe = pp.pipeline(
            model, (x[:2],), targets=y[:2], loss=functional.mse_loss, microbatches=2, timeout=20.0, mesh=mesh,
            placement=placement, batch_axis={"x": 0, "targets[0]": 0},
        )  # fmt: skip
        ours, theirs = torch.optim.Adam(pipe.parameters(), 0.1), torch.optim.Adam(whole.parameters(), 0.1)
        for step in range(3):
            result = pipe.step(mine[0], targets=mine[1])
            loss = functional.mse_loss(whole(x), y)
            loss.backward()
            torch.testing.assert_close(result.loss, loss.detach(), **TIGHT)
            norm = clip_grad_norm_(whole.parameters(), 0.01)
            torch.testing.assert_close(pipe.clip_grad_norm_(0.01), norm, **TIGHT)
            assert_trained_alike(pipe, whole, f"{names}, step {step}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for name, value in pipe.full_state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name], **TIGHT)
        pp.save(pipe, folder() / "-".join(names), ours)
        plain = tall(3)
        pp.load(plain, folder() / "-".join(names), torch.optim.Adam(plain.parameters()))
        torch.testing.assert_close(list(plain.parameters()), list(whole.parameters()), **TIGHT)
        attempt(lambda pipe=pipe: pp.fully_shard(pipe))
        pipe.close()
    say("equal")


def spread_values() -> None:
    """A DTensor does not pass a border as something else."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = tall()
    first = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    parallelize_module(model.blocks[0], mesh["tp"], first)
    parallelize_module(
        model.blocks[1], mesh["tp"], {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
    )
    x = torch.randn(4, 4).double()
    pipe = pp.pipeline(
        model, (x[:2],), targets=x[:2], loss=functional.mse_loss, microbatches=2, timeout=20.0, mesh=mesh
    )
    attempt(lambda: pipe.step(x, targets=x))
