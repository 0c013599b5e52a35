"""Pipelines that train together, on four processes: data parallelism, sharded parameters, tensor-parallel modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ppdsl as pp
from ppdsl.diagnostics import CallError
from ppdsl.runtime.replicas.fleet import fleet_of
from tests.runtime.launch import Finished, launch, launch_bare, said
from tests.runtime.mesh_common import adamw, train_whole
from tests.runtime.mesh_models import TIGHT, made, piped

WORKER = Path(__file__).with_name("mesh_worker.py")
REPLICAS = ("training", "reductions", "accumulating", "unequal", "once", "apart", "by_spec", "wrong_meshes")
SHARDS = (
    "spread", "modes", "keeping", "keeping_shards", "wide", "kinds", "combined", "refused", "peers", "spread_values",
    "failing", "fewer",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Finished:
    """Scenarios that leave the processes alive: starting them is most of the time."""
    return launch(4, str(folder), *REPLICAS, seconds=240, worker=WORKER)


@pytest.fixture(scope="module")
def shards(folder: Path) -> Finished:
    return launch(4, str(folder), *SHARDS, seconds=240, worker=WORKER)


def on_all(result: Finished, scenario: str) -> list[str]:
    return [said(result, rank, scenario) for rank in range(4)]


@pytest.mark.distributed
def test_replicas_train_like_the_plain_model_on_the_whole_batch(
    replicas: Finished,
) -> None:  # UR-013, UR-034, UR-084, UR-117, UR-118
    assert on_all(replicas, "training") == ["equal"] * 4, replicas.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("scenario", ["reductions", "accumulating"])
def test_sums_token_means_and_several_steps_are_those_of_one_batch(replicas: Finished, scenario: str) -> None:
    for text in on_all(replicas, scenario):
        *guarded, last = text.splitlines()
        assert last == "equal", replicas.stderr
        clipped = [line for line in guarded if "error" in line]
        assert len(clipped) == (4 if scenario == "accumulating" else 0)
        assert all(line.startswith("CallError: error[gradients-not-reduced]") for line in clipped)


@pytest.mark.distributed
def test_replicas_with_unequal_shares_count_by_their_rows(replicas: Finished) -> None:
    assert on_all(replicas, "unequal") == ["9 rows"] * 4, replicas.stderr


@pytest.mark.distributed
def test_every_parameter_is_reduced_once_in_a_step(replicas: Finished) -> None:  # UR-133
    assert on_all(replicas, "once") == ["once"] * 4, replicas.stderr


@pytest.mark.distributed
def test_replicas_keep_their_values_outputs_and_times_apart_in_every_layout(replicas: Finished) -> None:  # UR-136
    first, second = "gain, table.weight, a.weight, a.bias", "gain, table.weight, b.weight, norm.weight, norm.bias"
    places = {
        0: ("0 of 0", "0 of 0", "0 of 1"),
        1: ("1 of 0", "0 of 1", "1 of 0"),
        2: ("0 of 1", "1 of 0", "1 of 1"),
        3: ("1 of 1", "1 of 1", "0 of 0"),
    }
    for rank, expected in places.items():
        lines = said(replicas, rank, "apart").splitlines()
        assert lines == [f"{place}: {first if place[0] == '0' else second}" for place in expected], replicas.stderr


@pytest.mark.distributed
def test_a_spec_asks_for_replicas(replicas: Finished) -> None:
    assert on_all(replicas, "by_spec") == ["Pipeline(Talk: 2 stages on 2 ranks, 1f1b, 2 micro-batches)"] * 4


@pytest.mark.distributed
def test_a_mesh_that_does_not_fit_is_refused_on_every_rank_and_says_why(replicas: Finished) -> None:
    for rank in range(4):
        text = said(replicas, rank, "wrong_meshes")
        codes = re.findall(r"^\w+: error\[([a-z-]+)\]", text, re.MULTILINE)
        last = "wrong-mesh" if rank == 0 else "refused-elsewhere"
        assert codes == [
            *("wrong-mesh", "wrong-mesh", "unknown-mesh-axis", "wrong-mesh", "unknown-mesh-axis"),
            *("ranks-disagree", last, "unknown-rank", "replicas-in-one-process"),
            *("ranks-disagree", "ranks-disagree", "refused-elsewhere" if rank != 1 else "wrong-shape"),
        ], text
        assert "needs 6 processes, but there are 4 processes." in text
        assert "Stage 2 is on rank 2, but there are 2 ranks." in text
        assert "outputs=last, timeline=False on rank 1 of replica 1." in text
        assert text.endswith("\nTrue")


@pytest.mark.distributed
def test_sharded_stages_train_like_the_plain_model_and_gather_as_planned(shards: Finished) -> None:  # UR-013, UR-132
    for rank in range(4):
        lines = said(shards, rank, "spread").splitlines()
        assert lines[-1] == "equal", shards.stderr
        found = [tuple(map(int, re.findall(r"(\d+) (?:gathered|scattered)", line))) for line in lines[:-1]]
        # Once for each stage and step, or once for each computation; the first stage has only a tied parameter.
        row, column = rank % 2, rank // 2
        stages = [(1, 2)[row], (1, 2)[column], (1, 2)[row], (1, 2)[column]]
        assert found == [(count * times, count) for count, times in zip(stages, (1, 1, 9, 4), strict=True)], found


@pytest.mark.distributed
def test_freezing_evaluating_and_adding_up_are_those_of_the_plain_model(shards: Finished) -> None:
    assert on_all(shards, "modes") == ["equal"] * 4, shards.stderr


@pytest.mark.distributed
def test_shards_of_unequal_sizes_have_the_whole_norm(shards: Finished) -> None:
    assert on_all(shards, "wide") == ["equal"] * 4, shards.stderr


@pytest.mark.distributed
def test_gradients_of_every_element_type_are_added(shards: Finished) -> None:
    first, second = "narrow torch.bfloat16, idle torch.float32", "short torch.float16, turn torch.complex64"
    assert on_all(shards, "kinds") == [first, second] * 2, shards.stderr


@pytest.mark.distributed
def test_recomputed_and_compiled_stages_have_replicas_and_shards(shards: Finished) -> None:
    assert on_all(shards, "combined") == ["equal"] * 4, shards.stderr


@pytest.mark.distributed
def test_what_four_ranks_saved_goes_on_in_two_replicas_and_in_the_plain_model(shards: Finished, folder: Path) -> None:
    assert on_all(shards, "keeping") == ["step-4"] * 4, shards.stderr
    whole = made()
    theirs = adamw(whole)
    train_whole(whole, theirs, range(4))
    plain = made(30)
    ours = adamw(plain)
    assert pp.load(plain, folder / "two", ours).ranks == 4
    for kept in (folder / "two.safetensors", folder / "parts"):
        filled = made(31)
        pp.materialize(filled, kept)
        torch.testing.assert_close(list(filled.parameters()), list(plain.parameters()), rtol=0.0, atol=0.0)
    train_whole(plain, ours, range(4, 6))
    train_whole(whole, theirs, range(4, 6))
    torch.testing.assert_close(list(plain.parameters()), list(whole.parameters()), **TIGHT)


@pytest.mark.distributed
def test_shards_are_saved_as_whole_tensors_and_whole_tensors_load_as_shards(shards: Finished, folder: Path) -> None:
    assert len(set(on_all(shards, "keeping_shards"))) == 1, shards.stderr
    assert said(shards, 0, "keeping_shards").startswith("step-"), shards.stderr
    whole = made()
    theirs = adamw(whole)
    train_whole(whole, theirs, range(2))
    plain = made(30)
    ours = adamw(plain)
    pp.load(plain, folder / "shards", ours)
    train_whole(plain, ours, range(2, 4))
    train_whole(whole, theirs, range(2, 4))
    torch.testing.assert_close(list(plain.parameters()), list(whole.parameters()), **TIGHT)


@pytest.mark.distributed
def test_what_cannot_be_composed_is_refused_with_the_reason(shards: Finished) -> None:  # UR-134
    for text in on_all(shards, "refused"):
        codes = re.findall(r"^CallError: error\[([a-z-]+)\]", text, re.MULTILINE)
        assert codes == [
            *("no-replicas", "no-pipeline", "already-sharded", "already-sharded", "gradient-lost"),
            *("wrapped-model", "wrapped-model", "wrapped-model", "meta-parameter"),
        ], text
        assert "AttributeError: 'Pipeline' object has no attribute 'named_modules': it is no torch.nn.Module" in text
        assert "give the plain model, and mesh={'dp': ..., 'pp': ...} to pp.pipeline" in text


@pytest.mark.distributed
def test_tensor_parallel_modules_pass_through(shards: Finished) -> None:
    for text in on_all(shards, "peers"):
        assert text.endswith("\nequal"), shards.stderr
        assert re.findall(r"error\[([a-z-]+)\]", text) == ["no-replicas", "sharding-and-tp"]


@pytest.mark.distributed
def test_a_replica_with_more_batches_is_told_who_has_left(shards: Finished) -> None:  # UR-073
    assert [said(shards, rank, "fewer") for rank in range(2)] == ["", ""]
    for rank in (2, 3):
        text = said(shards, rank, "fewer")
        assert "of replica 0 ended before step 3, which rank" in text, text


@pytest.mark.distributed
def test_a_failure_in_one_replica_ends_all_with_one_error(shards: Finished) -> None:
    for rank in range(4):
        text = said(shards, rank, "failing")
        assert "Rank 1 failed in the backward of stage 3, micro-batch 2: ValueError: the third gradient" in text, text
        assert "pipeline-ended" in text
    assert "because rank 1 of replica 1 failed." in said(shards, 0, "failing")


@pytest.mark.distributed
def test_a_killed_process_ends_all_replicas(folder: Path) -> None:
    texts = launch_bare(4, str(folder), "killed", worker=WORKER)
    for rank in (0, 3):
        assert "error[rank-lost]: Rank 0 of replica 1 is gone without a word" in texts[rank], texts[rank]
    assert "RunError: error[" in texts[1], texts[1]


@pytest.mark.distributed
def test_a_spread_value_does_not_cross_a_border_as_something_else(shards: Finished) -> None:  # UR-135
    for rank in range(4):
        text = said(shards, rank, "spread_values")
        assert "A DTensor cannot be sent to another rank as what it is (forward of `blocks.0`, stage 0 to 1" in text


def test_replicas_in_one_process_are_refused() -> None:
    with pytest.raises(CallError, match="it would compute every replica in turn"):
        piped(made(), 2, mesh={"dp": 2, "pp": 2})
    assert piped(made(), 2, mesh={"dp": 1, "pp": 4}).step is not None


def test_every_process_has_one_place_in_every_mesh() -> None:
    for sizes in ({"dp": 2, "pp": 3}, {"pp": 3, "dp": 2}, {"dp": 6}, {"pp": 6}, {}):
        fleets = [fleet_of(sizes, process, 6) for process in range(6)]
        assert sorted({rank for pipeline in fleets[0].pipelines for rank in pipeline}) == list(range(6))
        for process, fleet in enumerate(fleets):
            assert process in fleet.members
            assert process in fleet.team
            assert fleet.members in fleet.pipelines
            assert fleet.team in fleet.teams
            assert (fleet.pipelines, fleet.teams) == (fleets[0].pipelines, fleets[0].teams)
            assert len(fleet.members) * fleet.replicas == 6
