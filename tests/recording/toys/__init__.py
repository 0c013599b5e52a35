"""Small models, each with one trap; importing this package registers all of them."""

from tests.recording.toys import (
    adversarial,
    buffers,
    containers,
    gradients,
    graphs,
    layers,
    marks,
    modes,
    modules,
    probed,
    refused,
    state,
    values,
    writes,
)
from tests.recording.toys.base import TOYS

__all__ = [
    "TOYS",
    "adversarial",
    "buffers",
    "containers",
    "gradients",
    "graphs",
    "layers",
    "marks",
    "modes",
    "modules",
    "probed",
    "refused",
    "state",
    "values",
    "writes",
]
