"""When the levels of state sharding exchange what, and what of it computing hides (ZeRO, Rajbhandari et al., SC 2020).

| level | beside every micro-batch | at the end of the step |
|---|---|---|
| 0 | | gradients summed (all-reduce) |
| 1 | | gradients scattered, updated parameters gathered |
| 2 | gradients scattered | updated parameters gathered |
| 3 | parameters gathered for the forward and for the backward, gradients scattered | |

What goes beside a micro-batch hides behind the computing of the neighbouring layers, so that a pass takes the longer of the two, as in
`predictor.passes`. What comes at the end of gradients hides behind the last backward (`predictor.overlap`); the last bucket never does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heterodyne.plan.schedules.times import StageTimes
from heterodyne.predictor.constants import constants
from heterodyne.predictor.overlap import exposed_s, last_bucket_s, returned_s
from heterodyne.search.fleet.network import Exchange, Exchanges

__all__ = ["at_end_s", "beside", "of_places", "usd"]


def at_end_s(exchanges: Iterable[Exchange], zero: int) -> float:
    """What shows after the pipelines, of the stage where most does.

    A stage that is done before others of its pipeline could hide more; a layer's replicas wait for the one that hides least.
    """
    return max(_at_end_s(own, zero) for own in exchanges)


def of_places(exchanges: Sequence[Exchange], places: int) -> list[Exchange]:
    """Where a place has several stages, what it exchanges for all of them, behind the shortest of their backwards."""
    if len(exchanges) == places:
        return list(exchanges)
    return [
        Exchange(
            reduced_s=sum(own.reduced_s for own in mine),
            scattered_s=sum(own.scattered_s for own in mine),
            updated_s=sum(own.updated_s for own in mine),
            scattered_layers_s=sum(own.scattered_layers_s for own in mine),
            gathered_layers_s=sum(own.gathered_layers_s for own in mine),
            backward_s=min(own.backward_s for own in mine),
        )
        for mine in (exchanges[place::places] for place in range(places))
    ]


def beside(stage: StageTimes, exchange: Exchange, zero: int) -> StageTimes:
    """The passes of a micro-batch with what is exchanged beside them; ``stage`` itself where all of that hides."""
    if zero < 2:
        return stage
    gathered = exchange.gathered_layers_s if zero > 2 else 0.0
    backward_s = gathered + exchange.scattered_layers_s
    if gathered <= stage.forward_s and backward_s <= stage.backward_s:
        return stage
    return StageTimes.halved(
        forward_s=max(stage.forward_s, gathered),
        backward_s=max(stage.backward_s, backward_s),
        recompute_s=stage.recompute_s,
    )


def usd(exchanges: Exchanges, zero: int, micro_batches: int) -> float:
    """Of a step's traffic. ``micro_batches``: of the pipeline that has most; the others take part in what it exchanges."""
    if zero == 0:
        return 2 * exchanges.gradients_usd
    scattered = exchanges.gradients_usd * (micro_batches if zero > 1 else 1)
    if zero < 3:
        return scattered + exchanges.updated_usd
    return scattered + 2 * micro_batches * exchanges.parameters_usd


def _at_end_s(own: Exchange, zero: int) -> float:
    stated = constants().stated
    if zero == 0:
        return exposed_s(own.reduced_s, own.backward_s, stated)
    if zero == 1:
        return exposed_s(own.scattered_s, own.backward_s, stated) + returned_s(own.updated_s, stated)
    return last_bucket_s(own.scattered_s, stated) + (returned_s(own.updated_s, stated) if zero == 2 else 0.0)
