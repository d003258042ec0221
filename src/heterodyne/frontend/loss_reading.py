"""What is read of a loss: which sums over the samples it adds, and what they are divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from heterodyne.frontend.denominator import Denominator
from heterodyne.graph import Loss

__all__ = ["Division", "LossReading", "LossReduction"]


@dataclass(frozen=True, kw_only=True)
class Division:
    """Where the graph divides by a denominator: a mean loss of labels, or the denominator among the arguments of ``node``."""

    node: fx.Node
    denominator: Denominator
    argument: fx.Node | None = None


@dataclass(frozen=True, kw_only=True)
class LossReduction:
    """What a value is: a sum over the samples, divided by powers of their number and by denominators.

    Args:
        kind: ``constant`` does not depend on the samples; ``added``: it is a sum of terms that are divided by the denominators of the
            whole batch (after `split_loss`), so the values of parts of the batch add up.
        samples: the power of the number of samples that it is divided by.
        divisions: by what else.
        shifts: ``(op, operand)`` where a term was added that does not depend on the samples; None: a number.
    """

    kind: Literal["constant", "quotient", "added"]
    samples: int = 0
    divisions: tuple[Division, ...] = ()
    shifts: tuple[tuple[fx.Node, fx.Node | None], ...] = ()

    @property
    def denominators(self) -> tuple[Denominator, ...]:
        return tuple(division.denominator for division in self.divisions)

    @property
    def counts(self) -> tuple[Any, ...]:
        """Equal for values with the same denominators."""
        return (self.samples, *sorted(d.key for d in self.denominators))

    @property
    def is_sum(self) -> bool:
        return self.kind == "added" or self.counts == (0,)

    @property
    def weights_add_up(self) -> bool:
        """Return whether the weights of all parts of a batch add up to 1, as a term that every part adds needs it."""
        return (self.samples, len(self.divisions)) == (1, 0) or (
            self.samples == 0 and len(self.counts) == 2 and all(d.additive for d in self.denominators)
        )


@dataclass(frozen=True, kw_only=True)
class LossReading:
    """The averaging of a loss, and what `split_loss` has to rewrite where its terms have denominators of their own.

    Args:
        divisions: to be done with the denominators of the whole batch.
        shares: ``(op, operand)``: operands to be multiplied by the part's share of the samples.
    """

    reduction: LossReduction
    divisions: tuple[Division, ...] = ()
    shares: tuple[tuple[fx.Node, fx.Node], ...] = ()

    @property
    def split(self) -> bool:
        return self.reduction.kind == "added"

    @property
    def denominators(self) -> tuple[Denominator, ...]:
        """Each once, in the order of the graph."""
        divisions = self.divisions if self.split else self.reduction.divisions
        return tuple({d.denominator.key: d.denominator for d in divisions}.values())

    @property
    def loss(self) -> Loss:
        count: Literal["samples", "tokens"] = "tokens" if self.denominators else "samples"
        if self.split:
            return Loss(reduction="terms", count=count)
        return Loss(reduction="sum") if self.reduction.is_sum else Loss(reduction="mean", count=count)
