"""Estimate of the step of alike pipelines whose stages are not cut yet.

In a time tau a stage takes floor(tau / t) layers, or as many as its memory holds at its place in the pipeline, so the bottleneck stage
takes the least tau in which the stages take all layers: found by bisection, for all pipelines at once. Pipeline fill, point-to-point
messages and exposed gradient sync are added. It selects the pipelines that are cut exactly and played.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterodyne.predictor.overlap import shown_s
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.fleet_wires import Wires
from heterodyne.search.fleet.kinds import Kind
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.template_search import NO_TIME_S, Room

__all__ = ["Estimate", "PipelineEstimate"]

_BISECTIONS = 12
_PARTS = 4  # stages of a kind whose memory is looked at: those ahead have the most micro-batches in flight
_BACKWARD = 2 / 3  # about so much of a stage's work


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of the bottleneck stage for a micro-batch, of the messages of one, and of exposed sync. Shape [pipelines].

    ``layers``: that a stage of each place may hold. Shape [pipelines, places].
    """

    layers: Floats
    bottleneck_s: Floats
    messages_s: Floats
    sync_s: Floats

    def select(self, which: NDArray[np.bool_]) -> Estimate:
        """Return those of some of the pipelines."""
        return Estimate(**{name: own[which] for name, own in vars(self).items()})

    def where(self, which: NDArray[np.bool_], other: Estimate) -> Estimate:
        """Return the other's for some of the pipelines."""
        pairs = ((name, own, getattr(other, name)) for name, own in vars(self).items())
        return Estimate(
            **{name: np.where(which if own.ndim == 1 else which[:, None], theirs, own) for name, own, theirs in pairs}
        )


@dataclass(frozen=True, kw_only=True)
class PipelineEstimate:
    """Estimates for stage kinds of one micro-batch size. ``zero``: the ZeRO level at which memory is counted."""

    predictor: Predictor
    kinds: Sequence[Kind]
    micro_batch: int
    zero: int
    recompute: bool

    def of(self, chains: Ints, runs: Ints, count: Ints, *, split: bool = False) -> Estimate:
        """Infinite where a pipeline does not fit.

        Args:
            chains: kinds in the order of the stages. ``runs``: stages of each, 0 in unused places. Shape [pipelines, places].
            count: of replicas. Shape [pipelines].
            split: backwards are split, so that each stage holds as many micro-batches as there are stages.
        """
        kinds = self.kinds
        layers = len(kinds[0].table.costs)
        forward, backward, recomputed = np.array([kind.layer_s for kind in kinds]).T
        inside, before = self._sends(chains, runs)
        after = np.pad(before[:, 1:], ((0, 0), (0, 1)))
        waits = np.where(runs > 1, inside + np.maximum(inside, np.maximum(before, after)), before + after)
        joined: NDArray[np.bool_] = np.all(np.isfinite(waits), axis=1)
        overlap = self.predictor.software.overlap_sends
        waits = np.zeros(waits.shape) if overlap else np.where(joined[:, None], waits, 0.0)
        rounds = np.ceil(self.predictor.global_batch / (self.micro_batch * count))
        behind = runs.sum(axis=1, keepdims=True) - np.cumsum(runs, axis=1)
        places = np.ceil(runs[..., None] * (np.arange(_PARTS) + 0.5) / _PARTS)  # of some of the stages of a kind
        ahead = runs.sum(axis=1)[:, None, None] if split else behind[..., None] + places
        held = np.minimum(np.broadcast_to(ahead, places.shape), rounds[:, None, None])
        plain, again = (self._room(chains, held, count, recompute=recompute) for recompute in (False, True))
        each, more = np.maximum(forward + backward, NO_TIME_S)[chains], recomputed[chains]

        def layers_in(seconds: Floats) -> Floats:
            left = np.maximum(0.0, seconds[:, None] - waits)
            own, less = (left // each)[..., None], (left // (each + more))[..., None]
            found: Floats = np.maximum(np.minimum(own, plain), np.minimum(less, again)).mean(axis=2)
            return found

        low, high = np.zeros(len(chains)), (each + more).max(axis=1) * layers + waits.max(axis=1)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            done = layers_in(middle)
            enough = (runs * done).sum(axis=1) >= layers
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        done = layers_in(high)
        fits = joined & ((runs * np.maximum(plain, again).mean(axis=2)).sum(axis=1) >= layers)
        sent = 2 * (inside * np.maximum(0, runs - 1) + before).sum(axis=1) if overlap else np.zeros(len(chains))
        return Estimate(
            layers=done,
            bottleneck_s=np.where(fits, high, np.inf),
            messages_s=sent,
            sync_s=self.sync_s(chains, runs, count, high),
        )

    def waits_s(self) -> list[float]:
        """About as long a stage of each kind waits for its messages in each micro-batch: one on either side, inside of a node."""
        if self.predictor.software.overlap_sends:
            return [0.0] * len(self.kinds)
        one = np.arange(len(self.kinds))[:, None]
        inside, _ = self._sends(one, np.full_like(one, 2))
        return [2 * seconds if np.isfinite(seconds) else 0.0 for seconds in inside[:, 0].tolist()]

    def _room(self, chains: Ints, held: Floats, count: Ints, *, recompute: bool) -> Floats:
        """The number of layers for which a stage has memory. Shape of ``held``: [pipelines, places, some of the stages]."""
        if recompute and not self.recompute:
            return np.zeros(held.shape)
        rooms = np.array([Room.of(kind, self.zero, recompute=recompute) for kind in self.kinds]).T
        return Room(*rooms[:, chains, None]).most_layers(held, count[:, None, None])

    def _sends(self, chains: Ints, runs: Ints) -> tuple[Floats, Floats]:
        """Seconds of a point-to-point message between two stages of one kind, and from the preceding kind. Shape [pipelines, places]."""
        kinds, fleet, wires = self.kinds, self.predictor.fleet, Wires(self.predictor.fleet)
        pools = [fleet.pools[kind.pool] for kind in kinds]
        sent = kinds[0].table.output_bytes(len(kinds[0].table.costs) // 2)
        devices, per_node = np.array([kind.devices for kind in kinds]), np.array([p.devices_per_node for p in pools])
        part = np.minimum(1.0, runs * devices[chains] / per_node[chains])  # of a node's link
        latency, rate = np.full((2, len(kinds), len(kinds)), np.inf)
        near = np.full(len(kinds), np.inf)
        for a, own in enumerate(pools):
            within = wires.inside(own)
            near[a] = (
                np.inf if within is None else within.latency_s + sent / kinds[a].devices / within.bandwidth_bytes_per_s
            )
            for b, other in enumerate(pools):
                wire = wires.between(own.name, other.name)
                if wire is not None:
                    latency[a, b], rate[a, b] = wire.latency_s, sent / wire.bandwidth_bytes_per_s
        inside = np.where(
            runs * devices[chains] <= per_node[chains],
            near[chains],
            latency[chains, chains] + rate[chains, chains] / np.maximum(part, 1e-9),
        )
        before = np.zeros(inside.shape)
        one, two = chains[:, :-1], chains[:, 1:]
        before[:, 1:] = latency[one, two] + rate[one, two] / np.maximum(1e-9, np.minimum(part[:, :-1], part[:, 1:]))
        return np.where(runs > 1, inside, 0.0), np.where(runs > 0, before, 0.0)

    def sync_s(self, chains: Ints, runs: Ints, count: Ints, bottleneck_s: Floats) -> Floats:
        """Exposed seconds of gradient sync, if each stage holds layers in proportion to its speed."""
        layers = len(self.kinds[0].table.costs)
        size = self.kinds[0].table.reduced_bytes(0, layers) / layers  # the same at all widths
        each = size * Wires(self.predictor.fleet).byte_s[[kind.pool for kind in self.kinds]]
        forward, backward, _ = np.array([kind.layer_s for kind in self.kinds]).T
        pace = 1 / np.maximum(forward + backward, NO_TIME_S)
        own = runs * pace[chains]
        part = layers * pace[chains] / own.sum(axis=1, keepdims=True)  # of the layers, on a stage
        once = np.where(runs > 0, part * each[chains], 0.0).max(axis=1) * (1 - 1 / count)
        return shown_s(once, once, _BACKWARD * bottleneck_s, self.predictor.software)

    def sync_of_devices_s(self, devices: Ints, bottleneck_s: Floats) -> Floats:
        """Exposed seconds of gradient sync with one other replica, if each device holds an equal part.

        ``devices``: Shape [pipelines, pools].
        """
        each, size = (
            Wires(self.predictor.fleet).byte_s,
            self.kinds[0].table.reduced_bytes(0, len(self.kinds[0].table.costs)),
        )
        once = size * np.where(devices > 0, each, 0.0).max(axis=1) / np.maximum(1, devices.sum(axis=1))
        return shown_s(once, once, _BACKWARD * bottleneck_s, self.predictor.software)
