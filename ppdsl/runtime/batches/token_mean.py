"""A mean over the targets that count: the whole batch's, whatever the micro-batches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ppdsl.diagnostics import CallError, Diagnostic, PpdslWarning, Severity, render_plain

__all__ = ["TokenMean", "warn_of_unequal_targets"]

_USUAL_IGNORED = -100


@dataclass(frozen=True, slots=True)
class TokenMean:
    """How to add losses that are means over the targets that count; `reduction="token_mean"` is `TokenMean()`.

    A micro-batch's loss weighs as much as its share of the batch's counted targets. The sum is the mean over the whole
    batch, whatever the number of micro-batches; the weights are known before the backward, and `.grad` is not scaled
    afterwards.

    A micro-batch without a counted target weighs 0 and its loss, which is not a number, is left out. Its gradient has
    to be 0 then, as that of `cross_entropy` is; a loss function that divides by the count itself gives NaN there, so
    let it return the sum and say `of="sum"`. When every target of the batch is ignored, the loss is NaN with gradients
    of 0, as `cross_entropy` of the whole batch has it; with `of="sum"` it is 0.

    Attributes:
        ignore_index: Targets with this value do not count.
        target: Name of the tensor that is counted, as the graph's inputs have it (`targets[0]`, `labels`); None: the
            only target of integers, or the argument `labels` or `targets` of a model that computes its own loss.
        shift: How many targets at the beginning of the last axis the model never compares with (1 in models that
            predict the next token from labels that are not shifted).
        of: What the loss function returns: the `mean` over a micro-batch's counted targets, or their `sum`.

    Raises:
        ValueError: `of` is something else, or `shift` is negative.

    >>> labels = torch.tensor([[1, -100], [2, 3], [-100, -100], [4, 5]])
    >>> TokenMean().weights([{"labels": row} for row in labels.split(2)])
    (0.6, 0.4)
    >>> TokenMean(of="sum").weights([{"labels": row} for row in labels.split(2)])
    (0.2, 0.2)
    """

    ignore_index: int = _USUAL_IGNORED
    target: str | None = None
    shift: int = 0
    of: str = "mean"

    def __post_init__(self) -> None:
        if self.of not in ("mean", "sum"):
            raise ValueError(f"of is {self.of!r}; it has to be 'mean' or 'sum'")
        if self.shift < 0:
            raise ValueError(f"shift is {self.shift}; it cannot be negative")

    def weights(self, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> tuple[float, ...]:
        """Return what each micro-batch's loss counts.

        Args:
            microbatches: For each micro-batch its tensors by name.

        Raises:
            CallError: It is not clear which tensor is counted.
        """
        return self.weigh(microbatches)[0]

    def weigh(self, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> tuple[tuple[float, ...], int]:
        """Return what each micro-batch's loss counts, and how many targets of all of them do.

        Raises:
            CallError: It is not clear which tensor is counted.
        """
        name = self._counted(microbatches[0])
        counts = [self._count(microbatch[name]) for microbatch in microbatches]
        total = sum(counts)
        if total == 0:
            # As the whole batch has it: a mean over nothing is not a number, a sum over nothing is 0.
            return ((1.0 / len(counts)) if self.of == "mean" else 0.0,) * len(counts), 0
        return tuple(count / total if self.of == "mean" else 1.0 / total for count in counts), total

    def _count(self, target: torch.Tensor) -> int:
        counted = target[..., self.shift :] if self.shift else target
        return int((counted != self.ignore_index).sum())

    def _counted(self, tensors: Mapping[str, torch.Tensor]) -> str:
        if self.target is not None:
            if self.target in tensors:
                return self.target
            message = f"There is no tensor `{self.target}` to count the targets of."
            raise CallError(Diagnostic("unknown-target", message, help=f"one of: {', '.join(tensors)}"))
        found = _targets(tensors)
        if len(found) == 1:
            return found[0]
        listed = ", ".join(f"{name} ({str(tensor.dtype)[6:]})" for name, tensor in tensors.items())
        message = f"token_mean needs one target of integers, but the call has {len(found) or 'none'}: {listed}."
        advice = 'name it: reduction=pp.TokenMean(target="labels")'
        raise CallError(Diagnostic("unclear-target", message, help=advice))


def warn_of_unequal_targets(
    whole: Mapping[str, torch.Tensor], microbatches: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    """Warn when a plain mean of micro-batches weighs targets unequally, because some of them are ignored.

    It looks at targets on the CPU only: elsewhere it would make the host wait.

    Args:
        whole: The tensors of the batch, by name.
        microbatches: The same for each micro-batch.
    """
    for name in _targets(microbatches[0]):
        targets = whole[name]
        if targets.device.type != "cpu" or targets.dtype != torch.int64 or not bool((targets == _USUAL_IGNORED).any()):
            continue
        parts = [microbatch[name] for microbatch in microbatches]
        ignored = {int((part == _USUAL_IGNORED).sum()) for part in parts}
        if len(ignored) > 1:
            message = (
                f"From {min(ignored)} to {max(ignored)} targets of a micro-batch in `{name}` are {_USUAL_IGNORED}, "
                "and reduction=mean weighs all micro-batches alike."
            )
            advice = "use reduction='token_mean' if the loss leaves these targets out"
            finding = Diagnostic("unequal-targets", message, help=advice, severity=Severity.WARNING)
            warnings.warn(PpdslWarning(render_plain([finding])), stacklevel=2)


def _targets(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    whole = {n: t for n, t in tensors.items() if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)}
    given = [name for name in whole if name.startswith(("targets[", "targets."))]
    return given or [name for name in whole if name in ("labels", "targets", "target")][:1]
