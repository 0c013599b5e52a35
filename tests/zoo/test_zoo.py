"""Unmodified models of Hugging Face, timm and torchvision train as stages with the whole model's gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.zoo.case import Case
from tests.zoo.harness import GRADIENT_TOLERANCE, Status, examine
from tests.zoo.models import CASES

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own
]

REFERENCE_MODELS = 54

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are taken in one order only when one thread takes them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@every_case
def test_model_in_eval_mode_gives_the_gradients_of_the_whole_model_also_recorded_on_meta(case: Case) -> None:
    _check(case, train=False)


@every_case
def test_model_in_train_mode_gives_the_gradients_of_the_whole_model(case: Case) -> None:
    _check(case, train=True)


def test_names_of_models_are_unique_and_all_models_of_the_reference_are_there() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES) >= REFERENCE_MODELS


def _check(case: Case, *, train: bool) -> None:
    if case.skip_reason is not None:
        pytest.skip(case.skip_reason)
    finding = examine(case, train=train, with_meta=not train)
    refused = case.refused_in_train if train else case.refused_in_eval
    if refused:
        assert finding.status is Status.REFUSED, f"accepted: {finding}"
        assert any(finding.text.startswith(f"error[{code}]") for code in refused), finding.text
        return
    assert finding.status in (Status.EQUAL, Status.ROUNDING), finding.text
    assert finding.gradient_error <= GRADIENT_TOLERANCE
    assert finding.stages >= 4
