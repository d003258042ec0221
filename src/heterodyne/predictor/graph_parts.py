"""A captured model in parts on alike devices: how its tensors lie there, and what the devices exchange.

Both are worked out for the whole model as one stage, as the runtime works them out (`plan.sharded_stage`); alike blocks then lie alike.
At the borders of a stage samples are dealt out too, which costs it a gather more that is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from heterodyne.cost.block_cost import meetings_of
from heterodyne.cost.exchange import Round
from heterodyne.cost.op_shares import StageShares
from heterodyne.errors import PlanError
from heterodyne.graph.ir import Block, ModelGraph
from heterodyne.graph.sharding import Sharding
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Layout, Pipeline, Region, Stage
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.predictor.network import Network

__all__ = ["GraphParts", "Way", "exchanged_s"]

Way = Literal["split", "context"]
"""Of weights, or of sequences."""
_SAMPLES: Final = {"split": 4, "context": 1}
"""Of the micro-batch for which it is worked out what lies how: sequences are cut where one alone is long, else samples would be."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphParts:
    """Of one model; what was worked out is kept."""

    graph: ModelGraph
    _shardings: dict[tuple[Way, int], Sharding | None] = field(default_factory=dict, repr=False)
    _parts: dict[tuple[Way, int, int], StageShares] = field(default_factory=dict, repr=False)

    def of(self, way: Way, members: int, samples: int) -> StageShares | None:
        """For micro-batches of so many samples on so many alike devices; None where the model does not get smaller so."""
        sharding = self._sharding(way, members)
        if sharding is None:
            return None
        key = (way, members, samples)
        if key not in self._parts:
            self._parts[key] = StageShares(sharding=sharding, samples=samples)
        return self._parts[key]

    def _sharding(self, way: Way, members: int) -> Sharding | None:
        if (way, members) not in self._shardings:
            try:
                self._shardings[way, members] = self._solved(way, members)
            except PlanError:  # something works in place on what would be cut, or samples cannot be distinguished
                self._shardings[way, members] = None
        return self._shardings[way, members]

    def _solved(self, way: Way, members: int) -> Sharding | None:
        stage = Stage(
            ops=(0, len(self.graph.ops)),
            devices=tuple(map(str, range(members))),
            regions=(Region(layout=Layout(kind=way, shares=(1,) * members)),),
        )
        pipeline = Pipeline(micro_batches=MicroBatches((_SAMPLES[way],)), stages=(stage,))
        found = shard_stage(self.graph, pipeline, 0)
        if found is None or not any(strategy.divides for strategy in found.strategies.values()):
            return None
        return found


def exchanged_s(block: Block, parts: StageShares, network: Network, scale: float) -> tuple[float, float]:
    """Seconds of a forward and of a backward in which the devices exchange inside of a block. ``scale``: of activations' bytes."""
    forward = backward = 0.0
    for meeting in meetings_of(parts.sharding.graph, block, parts):
        of_bytes = 1.0 if meeting.inside else scale  # statistics are in single precision
        forward += _rounds_s(meeting.forward, network, of_bytes)
        backward += _rounds_s(meeting.backward, network, of_bytes)
    return forward, backward


def _rounds_s(rounds: Iterable[Round], network: Network, scale: float) -> float:
    return sum(
        network.all_to_all_s(network.group(len(sent)), scale * max(sum(of_member) for of_member in sent))
        for sent in rounds
    )
