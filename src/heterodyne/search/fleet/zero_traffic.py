"""When the levels of state sharding exchange what, and what of it computing hides (ZeRO, Rajbhandari et al., SC 2020).

| level | beside every micro-batch | at the end of the step |
|---|---|---|
| 0 | | gradients summed (all-reduce) |
| 1 | | gradients scattered, updated parameters gathered |
| 2 | gradients scattered | updated parameters gathered |
| 3 | parameters gathered for the forward and for the backward, gradients scattered | |

What goes beside a micro-batch hides behind the computing of the neighbouring layers, so that a pass takes the longer of the two.
What comes at the end of gradients hides behind the last backward (`predictor.overlap`); the last bucket never does.
Software that does not overlap gradients exchanges them in the open, after the backward that made them; of parameters likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterodyne.plan.schedules.times import StageTimes
from heterodyne.predictor.overlap import last_bucket_s, returned_s, shown_s
from heterodyne.predictor.software import Software
from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.gradient_sync import Exchange, Exchanges

__all__ = ["beside", "exposed_at_end_s", "of_places", "usd"]


def exposed_at_end_s(exchange: Exchange, zero: int, software: Software) -> float:
    """Exposed gradient-sync seconds after the pipelines, of the stage with most.

    A stage that finishes before others of its pipeline could hide more; the replicas of a layer wait for the one that hides least.
    """
    return float(_at_end_s(exchange, zero, software).max())


def of_places(exchange: Exchange, places: int) -> Exchange:
    """Collectives of a rank with several virtual stages: all of them, behind the shortest of their backwards."""
    if len(exchange.reduced_s) == places:
        return exchange

    def together(seconds: Floats) -> Floats:
        found: Floats = seconds.reshape(-1, places).sum(axis=0)
        return found

    return Exchange(
        reduced_s=together(exchange.reduced_s),
        scattered_s=together(exchange.scattered_s),
        updated_s=together(exchange.updated_s),
        scattered_layers_s=together(exchange.scattered_layers_s),
        gathered_layers_s=together(exchange.gathered_layers_s),
        backward_s=exchange.backward_s.reshape(-1, places).min(axis=0),
    )


def beside(stages: Sequence[StageTimes], exchange: Exchange, zero: int, software: Software) -> list[StageTimes]:
    """Stage times of a micro-batch with ZeRO traffic; unchanged where all of it is hidden."""
    if zero < 2:
        return list(stages)
    scattered = exchange.scattered_layers_s.tolist()
    gathered = exchange.gathered_layers_s.tolist() if zero > 2 else [0.0] * len(scattered)
    if not (software.overlap_parameters if zero > 2 else software.overlap_gradients):
        return [
            replace(stage, forward_s=stage.forward_s + ahead, weight_s=stage.weight_s + ahead + own)
            for stage, ahead, own in zip(stages, gathered, scattered, strict=True)
        ]
    return [_beside(*own) for own in zip(stages, gathered, scattered, strict=True)]


def _beside(stage: StageTimes, gathered_s: float, scattered_s: float) -> StageTimes:
    backward_s = gathered_s + scattered_s
    if gathered_s <= stage.forward_s and backward_s <= stage.backward_s:
        return stage
    return StageTimes.halved(
        forward_s=max(stage.forward_s, gathered_s),
        backward_s=max(stage.backward_s, backward_s),
        recompute_s=stage.recompute_s,
    )


def usd(exchanges: Exchanges, zero: int, micro_batches: int) -> float:
    """Price of a step's traffic. ``micro_batches``: of the pipeline with most; the others take part in its collectives."""
    if zero == 0:
        return 2 * exchanges.gradients_usd
    scattered = exchanges.gradients_usd * (micro_batches if zero > 1 else 1)
    if zero < 3:
        return scattered + exchanges.updated_usd
    return scattered + 2 * micro_batches * exchanges.parameters_usd


def _at_end_s(own: Exchange, zero: int, software: Software) -> Floats:
    """Of each. Where nothing hides, gradients are exchanged in every backward at level 2, and beside it at level 3."""
    if zero == 0:
        return shown_s(own.reduced_s, 0.0, own.backward_s, software)
    if zero == 1:
        return shown_s(own.scattered_s, own.updated_s, own.backward_s, software)
    if zero == 2 and not software.overlap_gradients:
        return own.updated_s
    return last_bucket_s(own.scattered_s) + (returned_s(own.updated_s) if zero == 2 else 0.0)
