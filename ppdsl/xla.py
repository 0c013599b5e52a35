"""What only XLA devices have: collectives between them, and the circular pipeline of equal stages.

>>> import ppdsl as pp
>>> pp.xla.collectives.all_reduce.__name__, pp.xla.circular.__name__
('all_reduce', 'circular')
"""

from ppdsl.runtime.xla import collectives
from ppdsl.runtime.xla.spmd import Circular, circular

__all__ = ["Circular", "circular", "collectives"]
