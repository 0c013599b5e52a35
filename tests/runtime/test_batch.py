from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import CallError
from ppdsl.graph.ir import InputRoute, OutputRoute, TensorMeta
from ppdsl.runtime.batches.batch import Batch, join_microbatches, slice_like, split_batch


def route(name: str, *shape: int, dtype: str = "float32", requires_grad: bool = False) -> InputRoute:
    stride = tuple(torch.empty(shape).stride())
    return InputRoute(name, TensorMeta(shape, dtype, stride, requires_grad), (0,))


def refusal(routes: list[InputRoute], tensors: list[torch.Tensor], microbatches: int, **axes: int | None) -> str:
    with pytest.raises(CallError) as caught:
        split_batch(routes, tensors, microbatches, axes)
    return str(caught.value)


@given(st.integers(1, 6), st.lists(st.integers(2, 5), min_size=1, max_size=4), st.data())
def test_micro_batches_put_together_again_are_the_batch(
    microbatches: int, shape: list[int], data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    whole = list(shape)
    whole[axis] *= microbatches
    tensor = torch.randn(whole)
    batch = split_batch([route("x", *shape)], [tensor], microbatches, {"x": axis})
    pieces = [microbatch[0] for microbatch in batch.microbatches]
    assert [tuple(piece.shape) for piece in pieces] == [tuple(shape)] * microbatches
    made = OutputRoute("output", route("x", *shape).meta, 0)
    if microbatches > 1:
        assert batch.axes == (axis,)
    assert torch.equal(join_microbatches(made, pieces, batch, {"output": axis}), tensor)


def test_the_axis_is_found_from_the_shapes() -> None:
    routes = [route("tokens", 7, 2), route("positions", 3, 2, 7), route("table", 9, 4), route("scale")]
    tensors = [torch.zeros(7, 8), torch.zeros(3, 8, 7), torch.zeros(9, 4), torch.zeros(())]
    batch = split_batch(routes, tensors, 4)
    assert batch.axes == (1, 1, None, None)
    assert batch.rows == 2
    assert all(microbatch[2] is tensors[2] for microbatch in batch.microbatches)


def test_a_wrong_shape_names_both_and_what_to_do() -> None:
    assert refusal([route("x", 2, 3)], [torch.zeros(7, 3)], 4) == (
        "error[wrong-shape]: Input `x` has shape [7, 3], but 4 micro-batches of the recorded [2, 3] make [8, 3].\n"
        "help: give shape [8, 3], or build the pipeline with an example cut from such a batch"
    )


def test_a_sequence_of_another_length_is_a_wrong_shape() -> None:
    assert refusal([route("x", 2, 16)], [torch.zeros(8, 24)], 4).startswith(
        "error[wrong-shape]: Input `x` has shape [8, 24], but 4 micro-batches of the recorded [2, 16] make [8, 16]."
    )


def test_another_number_of_axes_is_a_wrong_shape() -> None:
    assert refusal([route("x", 2, 3)], [torch.zeros(8, 3, 1)], 4).startswith(
        "error[wrong-shape]: Input `x` has shape [8, 3, 1], but 4 micro-batches of the recorded [2, 3] make [8, 3]."
    )


def test_a_batch_smaller_than_the_number_of_microbatches() -> None:
    assert refusal([route("x", 2, 3)], [torch.zeros(3, 3)], 4) == (
        "error[batch-too-small]: Input `x` has 3 rows for 4 micro-batches.\n"
        "help: give a batch of 8 rows, or build the pipeline with fewer micro-batches"
    )


def test_the_rows_of_one_microbatch_are_no_batch() -> None:
    assert refusal([route("x", 2, 3)], [torch.zeros(2, 3)], 4) == (
        "error[batch-too-small]: The call has the rows of one micro-batch, but a step has 4 micro-batches.\n"
        "help: give 4 times as many rows, or build the pipeline with microbatches=1"
    )


def test_what_could_be_a_table_or_rows_is_refused_until_it_is_said() -> None:
    routes = [route("x", 2, 3), route("pos", 2, 5)]
    tensors = [torch.zeros(8, 3), torch.zeros(2, 5)]
    assert refusal(routes, tensors, 4) == (
        "error[ambiguous-batch]: Input `pos` has shape [2, 5]: it could be one tensor for every micro-batch, or 2 rows "
        "like those of `x` in one micro-batch.\n"
        "help: say batch_axis={'pos': None} to give it whole to every micro-batch, or give 8 rows to cut"
    )
    assert split_batch(routes, tensors, 4, {"pos": None}).axes == (0, None)


def test_a_wrong_element_type_names_both() -> None:
    assert refusal([route("x", 2, 3, dtype="int64")], [torch.zeros(8, 3)], 4) == (
        "error[wrong-dtype]: Input `x` is float32, recorded int64.\n"
        "help: convert it to int64, or build the pipeline with a float32 example"
    )


def test_an_input_that_requires_a_gradient_must_have_been_recorded_so() -> None:
    assert refusal([route("x", 2)], [torch.zeros(8, requires_grad=True)], 4) == (
        "error[wrong-requires-grad]: Input `x` requires a gradient, recorded without.\n"
        "help: detach it, or build the pipeline with such an example"
    )


def test_all_wrong_inputs_are_reported_at_once() -> None:
    text = refusal([route("x", 2, 3), route("y", 2)], [torch.zeros(7, 3), torch.zeros(8, dtype=torch.int64)], 4)
    assert text.count("error[") == 2


def test_one_microbatch_takes_exactly_the_recorded_shape() -> None:
    assert split_batch([route("x", 2, 3)], [torch.zeros(2, 3)], 1).axes == (None,)
    assert refusal([route("x", 2, 3)], [torch.zeros(4, 3)], 1) == (
        "error[wrong-shape]: Input `x` has shape [4, 3], recorded [2, 3].\n"
        "help: give that shape, or build another pipeline for this one"
    )


def test_an_axis_that_the_input_does_not_have() -> None:
    assert refusal([route("x", 2, 3)], [torch.zeros(8, 3)], 4, x=2) == (
        "error[unknown-axis]: Input `x` has 2 axes, so batch_axis=2 is none of them.\nhelp: use an axis from 0 to 1"
    )


def test_targets_of_a_loss_recorded_later_are_cut_where_the_rows_are() -> None:
    assert slice_like("targets[0]", torch.zeros(5, 8), 2, 4, {}).shape == (5, 2)
    with pytest.raises(CallError) as caught:
        slice_like("targets[0]", torch.zeros(8, 8), 2, 4, {})
    assert str(caught.value) == (
        "error[ambiguous-batch]: `targets[0]` has shape [8, 8], and several axes have the 8 rows of the batch.\n"
        "help: say which with batch_axis={'targets[0]': AXIS}, or None for a tensor that every micro-batch gets whole"
    )


def test_an_output_without_rows_is_refused_until_it_is_said() -> None:
    made = OutputRoute("output['table']", TensorMeta((5, 3), "float32"), 0)
    batch = Batch(((), ()), (0,), 2)
    pieces = [torch.zeros(5, 3), torch.ones(5, 3)]
    with pytest.raises(CallError) as caught:
        join_microbatches(made, pieces, batch, {})
    assert str(caught.value) == (
        "error[ambiguous-output]: Output `output['table']` has shape [5, 3] in a micro-batch, and no axis has its 2 "
        "rows.\nhelp: say batch_axis={\"output['table']\": AXIS}, None to take the last micro-batch's, or use "
        "microbatches=1"
    )
    assert join_microbatches(made, pieces, batch, {"output['table']": None}) is pieces[1]
