from __future__ import annotations

import gc
import importlib.util
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import ppdsl as pp
from ppdsl.runtime import library
from tests.runtime.models import CASES, Base
from tests.runtime.test_uneven import Tokens, cross_entropy, tokens_of
from tests.runtime.uneven import apart, make, plain_uneven, rows_of

AXES = {"tokens": 0, "targets[0]": 0}


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the first argument of each recording that pipelines make."""
    made: list[tuple[int, ...]] = []
    real = library.record_call

    def record_call(model, args, kwargs, **more):
        made.append(tuple(args[0].shape))
        return real(model, args, kwargs, **more)

    monkeypatch.setattr(library, "record_call", record_call)
    return made


def refusal(run: object) -> str:
    with pytest.raises(pp.PpdslError) as caught:
        run()
    return str(caught.value)


def language(**options: object) -> tuple[pp.Pipeline, Tokens]:
    torch.manual_seed(0)
    model = Tokens().double()
    x, y = tokens_of(2, 5)
    return pp.pipeline(model, (x,), targets=y, loss=cross_entropy, microbatches=4, **options), model


def agrees(pipe: pp.Pipeline, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether a step gives the loss and gradients of the whole batch."""
    model.zero_grad()
    result = pipe.step(x, targets=y, outputs="all")
    expected = cross_entropy(model(x), y)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    same = torch.allclose(result.loss, expected, rtol=1e-12) and torch.allclose(result.outputs, model(x), rtol=1e-12)
    return same and all(
        torch.allclose(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True)
    )


def test_sequences_of_other_lengths_run_whole_longer_or_shorter() -> None:  # UR-055
    pipe, model = language()
    for length in (5, 8, 3, 5, 8):
        assert agrees(pipe, model, *tokens_of(8, length)), length
    assert agrees(pipe, model, *tokens_of(7, 6))


def test_going_back_to_a_known_shape_records_nothing(recordings: list[tuple[int, ...]]) -> None:
    pipe, model = language(batch_axis=AXES)
    assert recordings == [(2, 5)]
    for rows, length in ((8, 5), (8, 7), (10, 5), (8, 5), (8, 7), (10, 5)):
        agrees(pipe, model, *tokens_of(rows, length))
    # Ten rows in four micro-batches are 3, 3, 2 and 2; those of two rows are the example's.
    assert recordings == [(2, 5), (2, 7), (3, 5)]


def test_the_last_sixteen_shapes_are_kept(recordings: list[tuple[int, ...]]) -> None:
    pipe, _ = language(batch_axis=AXES)
    for length in range(10, 28):
        pipe.evaluate(*tokens_of(8, length)[:1])
    recordings.clear()
    pipe.evaluate(tokens_of(8, 27)[0])
    pipe.evaluate(tokens_of(8, 12)[0])
    assert recordings == []
    shapes = pipe._library.shapes
    assert len(shapes._shaped) == 16
    assert len(shapes._recordings) <= 32


def test_a_shape_is_recorded_again_for_another_mode_of_the_model(recordings: list[tuple[int, ...]]) -> None:
    pipe, model = language(batch_axis=AXES)
    model.mix = nn.Sequential(model.mix, nn.Dropout(0.5))
    x, y = tokens_of(8, 7)
    for training in (True, False, True, False):
        model.train(training)
        pipe.evaluate(x, targets=y)
    expected = cross_entropy(model(x), y)
    assert torch.allclose(pipe.evaluate(x, targets=y).loss, expected, rtol=1e-12)
    assert recordings.count((2, 7)) == 2


def test_no_batch_stays_in_memory_after_its_step() -> None:
    pipe, _ = language(batch_axis=AXES)
    x, y = tokens_of(7, 9)
    pipe.step(x, targets=y)
    watched = [weakref.ref(x.untyped_storage()), weakref.ref(y.untyped_storage())]
    del x, y
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


class Convolutions(nn.Module):
    """A U-Net that takes images of any even size."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((2, 4), (4, 4), (8, 2)))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with pp.stage(0):
            skip = torch.relu(self.norm(self.down(x)))
        with pp.stage(1):
            h = functional.interpolate(torch.relu(self.deep(functional.max_pool2d(skip, 2))), scale_factor=2)
        with pp.stage(2):
            return self.up(torch.cat([skip, h], 1))


def test_a_convolutional_u_net_takes_images_of_another_size() -> None:  # UR-055
    torch.manual_seed(0)
    model, plain = Convolutions().double(), Convolutions().double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 2, 4, 4).double()
    pipe = pp.pipeline(model, (x,), targets=x.clone(), loss=functional.mse_loss, microbatches=3)
    for rows, height, width in ((6, 4, 4), (7, 4, 4), (6, 6, 4), (5, 8, 6), (2, 4, 8)):
        x, y = torch.randn(2, rows, 2, height, width).double()
        result = pipe.step(x, targets=y, outputs="all")
        outputs = []
        for a, b in zip(x.tensor_split(min(rows, 3)), y.tensor_split(min(rows, 3)), strict=True):
            outputs.append(plain(a))
            (functional.mse_loss(outputs[-1], b) * (len(a) / rows)).backward()
        assert torch.allclose(result.outputs, torch.cat(outputs), rtol=1e-12, atol=1e-12)
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12)
        for one, two in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(one, two)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_gpt2_trains_on_sequences_of_two_lengths() -> None:  # UR-055
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double().train()
    pp.place(model.transformer.h[0], 1)
    pp.begin(model.transformer.h[1], 2)
    example = torch.randint(0, 64, (2, 8))
    pipe = pp.pipeline(model, kwargs={"input_ids": example, "labels": example}, microbatches=2)
    for rows, length in ((4, 8), (4, 12), (3, 12), (5, 8)):
        ids = torch.randint(0, 64, (rows, length))
        model.zero_grad()
        result = pipe.step(input_ids=ids, labels=ids)
        expected = model(input_ids=ids, labels=ids).loss
        # The model computes its loss in float32.
        torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-6, atol=1e-7)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
    pp.unmark(model)


def test_without_dynamic_other_shapes_are_one_clear_error_each() -> None:  # UR-053, UR-054, UR-055, UR-059
    pipe, model = language(dynamic=False)
    assert agrees(pipe, model, *tokens_of(8, 5))
    for rows, length, text in (
        (7, 5, "error[wrong-shape]: Input `tokens` has shape [7, 5], but 4 micro-batches of the recorded [2, 5] make"),
        (3, 5, "error[batch-too-small]: Input `tokens` has 3 rows for 4 micro-batches."),
        (8, 6, "error[wrong-shape]: Input `tokens` has shape [8, 6], but 4 micro-batches of the recorded [2, 5] make"),
    ):
        x, y = tokens_of(rows, length)
        assert text in refusal(lambda x=x, y=y: pipe.step(x, targets=y))
    assert agrees(pipe, model, *tokens_of(8, 5))


def test_one_micro_batch_takes_any_shape() -> None:
    torch.manual_seed(0)
    model = Tokens().double()
    x, y = tokens_of(2, 5)
    pipe = pp.pipeline(model, (x,), targets=y, loss=cross_entropy, microbatches=1)
    for rows, length in ((2, 5), (3, 5), (2, 9), (7, 1)):
        assert agrees(pipe, model, *tokens_of(rows, length))


def test_a_loss_that_is_recorded_at_the_first_step_takes_an_uneven_batch() -> None:
    for rows in (8, 7, 3):
        case = CASES["chain"]
        inputs, targets = rows_of(case, rows)
        model, plain = case.model(), case.model()
        pipe = pp.pipeline(model, (inputs[0][:2],), loss=case.loss, microbatches=4)
        result = pipe.step(*inputs, targets=targets, outputs="all")
        assert apart(pipe, result, plain, *plain_uneven(case, plain, rows, 4)) == []
        for more in (8, 5):
            model.zero_grad()
            plain.zero_grad()
            inputs, targets = rows_of(case, more)
            result = pipe.step(*inputs, targets=targets, outputs="all")
            assert apart(pipe, result, plain, *plain_uneven(case, plain, more, 4)) == []


class Many(nn.Module):
    """Ids [B, S], positions [3, B, S], a table [V, D], a number and a list of names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids, pos, table, scale, names):
        with pp.stage(0):
            h = self.a(functional.embedding(ids, table) + pos.sum(0)[..., None] * len(names))
        with pp.stage(1):
            return self.b(h) * scale


@pytest.mark.parametrize("rows", [2, 3])
def test_each_input_has_its_own_axis_and_some_are_given_whole(rows: int) -> None:  # UR-048
    torch.manual_seed(0)
    model = Many().double()

    def call(size: int) -> dict[str, object]:
        return {
            "ids": torch.randint(0, 2, (size, 5)), "pos": torch.randn(3, size, 5).double(),
            "table": torch.arange(8.0 * rows / 2).double().reshape(rows, 4), "scale": torch.tensor(0.5).double(),
            "names": ["one", "two"],
        }  # fmt: skip

    y = torch.randn(4 * rows, 5, 4).double()
    given = {"table": None}
    pipe = pp.pipeline(
        model, kwargs=call(rows), targets=y[:rows], loss=functional.mse_loss, microbatches=4, batch_axis=given
    )
    for size in (4 * rows, 4 * rows - 1, 1):
        inputs = call(size)
        result = pipe.step(**inputs, targets=y[:size], outputs="all")
        with torch.no_grad():
            expected = model(**inputs)
        assert torch.allclose(result.outputs, expected, rtol=1e-12)
        assert torch.allclose(result.loss, functional.mse_loss(expected, y[:size]), rtol=1e-12)
        assert result.counted == size
    assert pipe._library.shapes.axes == {
        "ids": 0, "pos": 1, "table": None, "scale": None, "targets[0]": 0,
    }  # fmt: skip


class Squeezing(nn.Module):
    """Loses the axis of the rows when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with pp.stage(0):
            h = self.a(x).squeeze()
        with pp.stage(1):
            return self.b(h)


def squeezing() -> tuple[pp.Pipeline, nn.Module]:
    torch.manual_seed(0)
    model = Squeezing().double()
    x = torch.randn(2, 4).double()
    loss = lambda output, target: functional.mse_loss(output, target.squeeze())  # noqa: E731
    axes = {"x": 0, "targets[0]": 0}
    return pp.pipeline(model, (x,), targets=x.clone(), loss=loss, microbatches=4, batch_axis=axes), model


def test_a_value_that_loses_its_axis_of_one_row_trains_as_in_the_plain_loop() -> None:  # UR-062
    pipe, model = squeezing()
    x, y = torch.randn(2, 7, 4).double()
    loss = pipe.step(x, targets=y).loss
    parts = zip(x.tensor_split(4), y.tensor_split(4), strict=True)
    expected = sum(functional.mse_loss(model(a), b.squeeze()) * (len(a) / 7) for a, b in parts)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
    assert refusal(lambda: pipe.step(x, targets=y, outputs="all")) == (
        "error[ambiguous-output]: Output `output` has shape [2, 4] in a bigger and [4] in a smaller micro-batch, so "
        "there is no axis along which to put them together.\n"
        "help: give batches that divide evenly, do not ask for outputs, or let the output have one axis of rows"
    )


def test_inputs_of_different_rows_are_refused_with_their_numbers() -> None:
    pipe, model = language()
    assert agrees(pipe, model, *tokens_of(8, 5))
    assert refusal(lambda: pipe.step(tokens_of(7, 5)[0], targets=tokens_of(6, 5)[1])) == (
        "error[rows-differ]: Inputs have different numbers of rows: `tokens` has 7, `targets[0]` has 6.\n"
        "help: give every input and target the same rows of the batch"
    )
    assert agrees(pipe, model, *tokens_of(7, 5))


def test_micro_batches_that_are_split_already_are_refused_before_anything_is_sent() -> None:  # UR-038, UR-056
    pipe, model = language()
    parts = [tokens_of(2, length)[0] for length in (8, 16, 12, 16)]
    assert refusal(lambda: pipe.step(parts, targets=parts)) == (
        "error[wrong-structure]: Argument `tokens` is a list of 4, but was recorded as one tensor.\n"
        "help: give the whole batch as one tensor: the pipeline cuts it into micro-batches by itself"
    )
    x, y = tokens_of(8, 5)
    assert "error[wrong-structure]: Argument `targets[0]` is a list of 4" in refusal(
        lambda: pipe.step(x, targets=list(y.split(2)))
    )
    assert agrees(pipe, model, x, y)


def test_a_batch_without_rows_is_refused() -> None:
    pipe, model = language()
    assert refusal(lambda: pipe.step(tokens_of(0, 5)[0], targets=tokens_of(0, 5)[1])) == (
        "error[empty-batch]: Input `tokens` has shape [0, 5]: it is empty, so there is nothing to run.\n"
        "help: leave out batches without rows\n\n"
        "error[empty-batch]: Input `targets[0]` has shape [0, 5]: it is empty, so there is nothing to run.\n"
        "help: leave out batches without rows"
    )
    assert agrees(pipe, model, *tokens_of(8, 5))


def test_a_first_batch_that_can_be_read_in_two_ways_is_refused_until_it_is_said() -> None:
    pipe, model = language()
    x, y = tokens_of(3, 5)
    assert refusal(lambda: pipe.step(x, targets=y)) == (
        "error[ambiguous-batch]: Input `tokens` has shape [3, 5], recorded [2, 5] in a micro-batch: the axis of its "
        "batch could be axis 0 (3 rows) or axis 1 (5 rows).\n"
        "help: say which with batch_axis={'tokens': 0}; the model runs with more rows along each"
    )
    assert agrees(pipe, model, *tokens_of(8, 5)), "a batch like the example shows the axis"
    assert agrees(pipe, model, x, y)


def test_the_model_decides_which_axis_is_the_batch_where_shapes_do_not_say_it() -> None:
    case = CASES["chain"]
    for rows in (1, 3, 16):
        model, plain = case.model(), case.model()
        pipe = make(case, model)
        inputs, targets = rows_of(case, rows)
        result = pipe.step(*inputs, targets=targets, outputs="all")
        assert apart(pipe, result, plain, *plain_uneven(case, plain, rows, 4)) == []
        assert pipe._library.shapes.axes == {"x": 0, "targets[0]": 0}


class Added(Base):
    """Adds a second input, as rows or as a table."""

    def __init__(self, table: bool) -> None:
        super().__init__()
        self.table = table

    def forward(self, x, pos):
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h) + (pos.sum(0) if self.table else pos)


def test_a_table_with_as_many_rows_as_a_micro_batch_is_told_by_the_model() -> None:
    torch.manual_seed(0)
    x, pos = torch.randn(8, 4), torch.randn(2, 4)
    tabled = pp.pipeline(Added(table=False), (x[:2], x[:2]), microbatches=4)
    assert refusal(lambda: tabled(x, pos)) == (
        "error[ambiguous-batch]: Input `pos` has shape [2, 4]: it could be one tensor for every micro-batch, or 2 rows "
        "like those of `x` in one micro-batch.\n"
        "help: say batch_axis={'pos': None} to give it whole to every micro-batch, or give 8 rows to cut"
    )
    assert tabled(x, x).shape == (8, 4)

    class Mask(Base):
        def forward(self, x, mask):
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                return self.b(h) @ mask

    model = Mask()
    pipe = pp.pipeline(model, (torch.randn(4, 4), torch.eye(4)), microbatches=2)
    with torch.no_grad():
        assert torch.allclose(pipe(x, torch.eye(4)), model(x, torch.eye(4)), atol=1e-6)


def test_targets_with_two_axes_of_the_batchs_length_are_cut_where_the_loss_takes_them() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 8)

        def forward(self, x):
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                return self.b(h)

    torch.manual_seed(0)
    wide = Wide()
    x, y = torch.randn(8, 4), torch.randn(8, 8)
    pipe = pp.pipeline(wide, (x[:2],), loss=functional.mse_loss, microbatches=4)
    torch.testing.assert_close(pipe.step(x, targets=y).loss, functional.mse_loss(wide(x), y).detach())


def test_an_output_whose_shape_does_not_say_its_axis_is_told_by_a_second_recording() -> None:
    class Turned(Base):
        def forward(self, x):
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                return self.b(h).repeat_interleave(3, 0), self.a.weight * 1

    torch.manual_seed(0)
    model = Turned()
    x = torch.randn(8, 4)
    pipe = pp.pipeline(model, (x[:2],), microbatches=4, batch_axis={"output[1]": None})
    with torch.no_grad():
        rows, table = model(x)
    for size in (8, 7, 3):
        ours = pipe(x[:size])
        assert torch.allclose(ours[0], rows[: 3 * size], atol=1e-6)
        assert torch.equal(ours[1], table)
    unclear = pp.pipeline(model, (x[:2],), microbatches=4)
    for size, its in ((8, "its 2 rows"), (7, "rows of the batch")):
        assert refusal(lambda size=size: unclear(x[:size])) == (
            f"error[ambiguous-output]: Output `output[1]` has shape [4, 4] in a micro-batch, and no axis has {its}.\n"
            "help: say batch_axis={'output[1]': AXIS}, None to take the last micro-batch's, or use microbatches=1"
        )


class Steered(Base):
    """Takes another way with few rows, or with many columns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x):
        with pp.stage(0):
            h = self.a(x[:, :4])
            two = h * 2
        with pp.stage(1):
            if self.kind == "edge" and x.shape[0] < 2:
                h = h + two
            if self.kind == "module" and x.shape[1] > 4:
                h = self.c(h)
            return self.b(h)


def test_micro_batches_that_take_different_ways_are_refused_with_the_difference() -> None:
    x = torch.randn(8, 4)
    pipe = pp.pipeline(Steered("edge"), (x[:2],), microbatches=4, batch_axis={"x": 0})
    assert refusal(lambda: pipe(x[:7])) == (
        "error[uneven-differs]: Micro-batches of 2 rows and of 1 row take different ways between the stages: `mul` "
        "(float32, stage 0 to 1) is sent in the smaller ones only.\n"
        "help: give batches that divide evenly into 4 micro-batches"
    )
    assert pipe(x[:3]).shape == (3, 4), "all of one row: another plan"
    assert pipe(x).shape == (8, 4)


def test_a_shape_that_moves_parameters_to_other_stages_is_refused() -> None:
    x = torch.randn(8, 6)
    pipe = pp.pipeline(Steered("module"), (x[:2, :4],), microbatches=4, batch_axis={"x": 0})
    assert refusal(lambda: pipe(x)) == (
        "error[other-stages]: With `x` float32[2, 6] the model has other stages than with the example: stage 1 uses "
        "`c.bias` in this call only.\nhelp: build another pipeline for such inputs"
    )


def test_a_shape_that_the_model_does_not_take_is_refused_with_its_own_words() -> None:
    case = CASES["chain"]
    pipe = make(case, case.model())
    inputs, targets = rows_of(case, 8)
    wide = torch.randn(8, 5).double()
    assert refusal(lambda: pipe.step(wide, targets=targets)).startswith(
        "error[wrong-shape]: The model does not run on a micro-batch with `x` [2, 5] (recorded [2, 4]): "
    )
    pipe.step(*inputs, targets=targets)


def test_numbers_that_steer_the_model_are_checked_in_other_shapes_too() -> None:
    class Guarded(Base):
        def forward(self, x):
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                return self.b(h) if bool((x > -100).all()) else h

    x = torch.randn(8, 4)
    pipe = pp.pipeline(Guarded(), (x[:2],), microbatches=4, batch_axis={"x": 0})
    assert pipe(x[:7]).shape == (7, 4)
    x[5, 0] = -1000.0
    assert "error[input-guard]" in refusal(lambda: pipe(x[:7]))


def test_a_stage_that_gives_another_shape_than_recorded_is_named_before_anything_is_sent() -> None:  # UR-061
    class Odd(nn.Module):
        calls = 0

        def forward(self, x):
            if type(x) is torch.Tensor:
                self.calls += 1
            return x[:, :3] if self.calls == 3 else x

    class Sender(Base):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def forward(self, x):
            with pp.stage(0):
                h = self.odd(self.a(x))
            with pp.stage(1):
                return h * 2

    model = Sender()
    x = torch.randn(8, 4)
    pipe = pp.pipeline(model, (x[:2],), microbatches=4)
    model.odd.calls = 0
    text = refusal(lambda: pipe(x))
    assert "error[unexpected-output]" in text
    assert "float32[2, 3]" in text
    assert "micro-batch 2" in text
