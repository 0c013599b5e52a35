"""Collectives between the XLA devices of one process, differentiable (public as `pp.xla.collectives`).

One process drives all devices, so a collective takes the tensors of all that take part in one call:
`all_reduce([a, b])` with `a` on `xla:0` and `b` on `xla:1` returns two tensors, again one on each.
"""

from ppdsl.runtime.xla.collectives.calls import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter
from ppdsl.runtime.xla.collectives.moving import Sent, collective_permute, gather, recv, scatter, send
from ppdsl.runtime.xla.collectives.testing import Verdict, self_test

__all__ = [
    "Sent",
    "Verdict",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "collective_permute",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "self_test",
    "send",
]
