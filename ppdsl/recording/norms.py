"""Running statistics of normalisation layers: torch changes them in calls whose names and versions do not say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["statistics_written"]

# Positions and names of the running mean, the running variance, and the flag that says whether they are updated.
_CALLS: dict[Any, tuple[tuple[int, str], tuple[int, str], tuple[int, str]]] = {
    F.batch_norm: ((1, "running_mean"), (2, "running_var"), (5, "training")),
    F.instance_norm: ((1, "running_mean"), (2, "running_var"), (5, "use_input_stats")),
    torch.batch_norm: ((3, "running_mean"), (4, "running_var"), (5, "training")),
    torch.instance_norm: ((3, "running_mean"), (4, "running_var"), (5, "use_input_stats")),
    torch.native_batch_norm: ((3, "running_mean"), (4, "running_var"), (5, "training")),
}
_DEFAULTS = {F.batch_norm: False, F.instance_norm: True}


def statistics_written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the running statistics that a call updates.

    >>> mean, var, x = torch.zeros(2), torch.ones(2), torch.ones(3, 2)
    >>> len(statistics_written(F.batch_norm, (x, mean, var), {"training": True}))
    2
    >>> statistics_written(F.batch_norm, (x, mean, var), {})
    []
    """
    try:
        places = _CALLS.get(func)
    except TypeError:  # a callable object without a hash
        return []
    if places is None:
        return []
    mean, var, flag = (args[at] if at < len(args) else kwargs.get(name) for at, name in places)
    updates = _DEFAULTS.get(func, False) if flag is None else flag
    return [value for value in (mean, var) if updates and isinstance(value, torch.Tensor)]
