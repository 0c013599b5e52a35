from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.graph.ir import TensorMeta
from ppdsl.runtime.layout import Layout
from tests.runtime.hand_made import meta_of

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def carried(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Send a tensor through its row of bytes."""
    arrived = layout.empty(torch.device("cpu"))
    if layout.numel:
        layout.wire(arrived).copy_(layout.wire(layout.conform(tensor)))
    return arrived


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0, 3), (2, 1, 4)], ids=str)
def test_every_element_type_arrives_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    arrived = carried(tensor, Layout.of(meta_of(tensor)))
    assert arrived.dtype == dtype
    assert torch.equal(arrived, tensor)


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_a_tensor_without_gaps_keeps_its_strides(order: list[int], sizes: list[int]) -> None:
    tensor = torch.randn(sizes).permute(order)
    arrived = carried(tensor, Layout.of(meta_of(tensor)))
    assert torch.equal(arrived, tensor)
    assert all(a == b or n == 1 for a, b, n in zip(arrived.stride(), tensor.stride(), tensor.shape, strict=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6)[:, ::2],
        torch.randn(6, 4)[1:3],
        torch.randn(1, 4).expand(5, 4),
        torch.randn(8).unfold(0, 3, 1),
        torch.randn(3, 4, dtype=torch.complex64).conj(),
        torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    ],
    ids=["slice", "offset", "expanded", "overlapping", "conjugated", "negated"],
)
def test_gaps_and_overlaps_arrive_row_major_with_the_same_numbers(tensor: torch.Tensor) -> None:
    arrived = carried(tensor, Layout.of(meta_of(tensor)))
    assert torch.equal(arrived, tensor)
    assert arrived.is_contiguous()


def test_a_tensor_of_the_layout_is_not_copied() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layout = Layout.of(meta_of(tensor))
    assert layout.conform(tensor) is tensor
    assert layout.wire(tensor).data_ptr() == tensor.data_ptr()


def test_axes_of_one_element_may_have_any_stride() -> None:
    layout = Layout.of(TensorMeta((1, 4), "float32", (4, 1)))
    tensor = torch.randn(8)[:4].as_strided((1, 4), (7, 1))
    assert layout.conform(tensor).data_ptr() == tensor.data_ptr()


def test_the_gradient_of_a_leaf_has_the_layout_of_its_value() -> None:
    for value in (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 4).t(), torch.randn(4)):
        leaf = value.detach().requires_grad_(True)
        (leaf.contiguous() * torch.randn(leaf.shape)).sum().backward()
        assert leaf.grad is not None
        assert Layout.of(meta_of(value)).conform(leaf.grad) is leaf.grad
