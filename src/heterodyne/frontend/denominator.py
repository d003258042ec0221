"""What a loss is divided by: a function of statistics that add up over the samples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

__all__ = ["Denominator", "Statistic"]


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A number (or tensor of a fixed shape) whose value for a batch is the sum of its values for the parts of the batch.

    Args:
        node: summed over all its entries if ``labels``, else taken as it is.
        labels: count the entries of ``node`` that are not ``ignore``, with the class weights ``weight`` if there are any.
        mean: ``node`` is a mean over the samples; it adds up once it is multiplied by their number.
    """

    node: fx.Node
    labels: bool = False
    ignore: int | None = None
    weight: fx.Node | None = None
    mean: bool = False


@dataclass(frozen=True, kw_only=True)
class Denominator:
    """``value`` as a function of ``statistics`` and of the number of samples; ``value`` None: the one statistic itself.

    Args:
        key: equal for denominators that compute the same from the same inputs.
        shape: of the value; () for almost all losses.
        double: whether the value is in double precision.
    """

    value: fx.Node | None
    statistics: tuple[Statistic, ...]
    key: int
    shape: tuple[int, ...] = ()
    double: bool = False

    @property
    def additive(self) -> bool:
        """Return whether the denominators of the parts of a batch add up to that of the batch."""
        return self.value is None
