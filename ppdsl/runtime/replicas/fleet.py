"""Which processes make up a pipeline, and which ones are its replicas: `mesh=` of `pipeline`, made sense of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppdsl.diagnostics import CallError, Diagnostic

__all__ = ["Fleet", "MeshLike", "fleet_of", "refuse_replicas", "whole_group"]

MeshLike = Mapping[str, int] | DeviceMesh | None
"""Sizes by the names `pp` and `dp`, the first one outermost; a mesh of torch with these names; None: one pipeline."""

_NAMES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Fleet:
    """All processes, seen from one of them. Processes go by their number in the default group.

    A pipeline with its ranks is one row along `pp`. Replicas are the processes that run the same rank of pipelines
    that differ in their place along `dp` alone. Tensor-parallel peers (`tp`) are none of ppdsl's business, except that
    a failure ends them, too.

    Attributes:
        pipelines: The ranks of every pipeline, in the same order on all processes.
        teams: The replicas of every rank of every pipeline, in the same order on all processes.
        members: The ranks of this process's pipeline.
        team: The replicas of this process, in the order of their pipelines; this process among them.
        names: What to call each process in a message.
        text: The mesh in words; all processes agree on it.
        first_of_peers: Whether this process is the first one of its tensor-parallel peers, or has none.
    """

    pipelines: tuple[tuple[int, ...], ...]
    teams: tuple[tuple[int, ...], ...]
    members: tuple[int, ...]
    team: tuple[int, ...]
    names: tuple[str, ...]
    text: str
    first_of_peers: bool = True

    @property
    def replicas(self) -> int:
        """How many pipelines train together."""
        return len(self.team)

    @property
    def peers(self) -> int:
        """How many tensor-parallel peers each process has, itself included."""
        return len(self.names) // (len(self.members) * len(self.team))


def whole_group(process: int, processes: int) -> Fleet:
    """Return one pipeline of all processes, seen from one of them.

    >>> whole_group(1, 2).members
    (0, 1)
    """
    everyone = tuple(range(processes))
    names = tuple(map(str, everyone))
    return Fleet((everyone,), tuple((rank,) for rank in everyone), everyone, (process,), names, f"pp={processes}")


def fleet_of(mesh: MeshLike, process: int, processes: int) -> Fleet:
    """Return what a mesh says, seen from one process.

    Args:
        mesh: As `pipeline` takes it.
        process: Number of this process in the default group.
        processes: How many there are.

    Raises:
        CallError: The mesh does not fit the processes, or has an axis that is not supported.

    >>> fleet = fleet_of({"dp": 2, "pp": 2}, process=3, processes=4)
    >>> fleet.members, fleet.team, fleet.names[3]
    ((2, 3), (1, 3), '1 of replica 1')
    """
    if mesh is None:
        return whole_group(process, processes)
    names, grid = _grid_of_sizes(mesh, processes) if isinstance(mesh, Mapping) else _grid_of_mesh(mesh)
    found = sorted(grid.flatten().tolist())
    if found != list(range(processes)):
        message = f"The mesh has {len(found)} processes, but there are {processes}."
        advice = "a mesh covers each process of the default group once"
        raise CallError(Diagnostic("wrong-mesh", message, help=advice))
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, grid.shape, strict=True))
    cube = _in_order(names, grid)
    pipelines = tuple(tuple(row) for plane in cube.permute(1, 2, 0).tolist() for row in plane)
    teams = tuple(tuple(row) for plane in cube.permute(0, 2, 1).tolist() for row in plane)
    rank, replica, peer = (int(place) for place in (cube == process).nonzero()[0])
    titles = [_title(cube, number) for number in range(processes)]
    members, team = tuple(cube[:, replica, peer].tolist()), tuple(cube[rank, :, peer].tolist())
    return Fleet(pipelines, teams, members, team, tuple(titles), f"{sizes} ({grid.tolist()})", peer == 0)


def refuse_replicas(mesh: MeshLike) -> None:
    """Refuse a mesh where all ranks live in one process.

    Raises:
        CallError: It has replicas.
    """
    replicas = dict(mesh).get("dp", 1) if isinstance(mesh, Mapping) else 1
    if isinstance(mesh, DeviceMesh) or replicas != 1:
        what = "a DeviceMesh" if isinstance(mesh, DeviceMesh) else f"dp={replicas}"
        message = f"The mesh is {what}, but all ranks live in this process: it would compute every replica in turn."
        advice = "start the processes with torchrun, or give the whole batch to one pipeline with more micro-batches"
        raise CallError(Diagnostic("replicas-in-one-process", message, help=advice))


def _grid_of_sizes(mesh: Mapping[str, int], processes: int) -> tuple[tuple[str, ...], torch.Tensor]:
    sizes = dict(mesh)
    for name, size in sizes.items():
        if name not in ("pp", "dp"):
            _refuse_axis(name)
        if size < 1:
            message = f"The mesh has {size} ranks along {name}, but at least 1."
            raise CallError(Diagnostic("wrong-mesh", message, help="for example mesh={'dp': 2, 'pp': 2}"))
    replicas = sizes.get("dp", 1)
    sizes.setdefault("pp", max(1, processes // replicas))
    sizes.setdefault("dp", 1)
    if math.prod(sizes.values()) != processes:
        listed = " x ".join(f"{name}={size}" for name, size in sizes.items())
        noun = "process" if processes == 1 else "processes"
        message = f"The mesh {listed} needs {math.prod(sizes.values())} processes, but there are {processes} {noun}."
        raise CallError(Diagnostic("wrong-mesh", message, help=f"start {math.prod(sizes.values())} processes"))
    return tuple(sizes), torch.arange(processes).reshape(tuple(sizes.values()))


def _grid_of_mesh(mesh: DeviceMesh) -> tuple[tuple[str, ...], torch.Tensor]:
    names = mesh.mesh_dim_names
    if names is None or "pp" not in names:
        what = "no names" if names is None else f"the dimensions {', '.join(names)}"
        message = f"The mesh has {what}, but a pipeline runs along `pp`."
        advice = 'for example init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "pp"))'
        raise CallError(Diagnostic("wrong-mesh", message, help=advice))
    for name in names:
        if name not in _NAMES:
            _refuse_axis(name)
    return names, mesh.mesh.cpu()


def _refuse_axis(name: str) -> None:
    """Refuse an axis of unknown meaning: gradients that nobody adds along it would be wrong without a word.

    Raises:
        CallError: Always.
    """
    message = f"The mesh has an axis `{name}`, and ppdsl does not know what has to be added along it."
    advice = "a mesh has `pp` and `dp`; a DeviceMesh can also have `tp`, whose modules run inside a stage"
    raise CallError(Diagnostic("unknown-mesh-axis", message, help=advice))


def _in_order(names: Sequence[str], grid: torch.Tensor) -> torch.Tensor:
    """Return the processes with the axes pp, dp, tp, each of which is there."""
    there = [names.index(name) for name in _NAMES if name in names]
    cube = grid.permute(there)
    for place, name in enumerate(_NAMES):
        if name not in names:
            cube = cube.unsqueeze(place)
    return cube


def _title(cube: torch.Tensor, process: int) -> str:
    rank, replica, peer = (int(place) for place in (cube == process).nonzero()[0])
    title = str(rank)
    if cube.shape[1] > 1:
        title += f" of replica {replica}"
    if cube.shape[2] > 1:
        title += f" (tp {peer})"
    return title
