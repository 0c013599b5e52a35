"""Every trap of the plain runtime on XLA devices: as in the plain loop over the micro-batches."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

import ppdsl as pp
from ppdsl.runtime.xla import adapter as xla_adapter
from tests.trust.entry import Entry, differences, keys_of
from tests.trust.graphs import GRAPH_ENTRIES
from tests.trust.structures import STRUCTURE_ENTRIES

pytestmark = pytest.mark.xla

ENTRIES = (*GRAPH_ENTRIES, *STRUCTURE_ENTRIES)


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    """Start torch_xla before the first backward of this process."""
    xla_adapter.device_count()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_xla_devices_train_like_the_plain_loop(entry: Entry) -> None:
    placement = {key: number % 4 for number, key in enumerate(keys_of(entry, 3))}
    with warnings.catch_warnings():
        # Some of them decide by numbers inside a stage.
        warnings.simplefilter("ignore", pp.PpdslWarning)
        found = differences(
            replace(entry, exact=False, tolerance=1e-7), 3, devices="xla", transport="permute", placement=placement
        )
    assert found == []
