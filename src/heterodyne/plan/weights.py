"""Which devices hold, reduce and update which weights under a plan: worked out once, by every rank and by the simulator alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Reach
from heterodyne.plan.boxes import Box
from heterodyne.plan.buckets import Bucket, Holdings, gradient_buckets, holdings_of, stages_reading
from heterodyne.plan.plan import Plan
from heterodyne.plan.state_shards import ShardedBucket, sharded_bucket, state_shares

__all__ = ["PlannedWeights"]


@dataclass(frozen=True, kw_only=True)
class PlannedWeights:
    """Args:
    devices: of the plan, in its order.
    holdings: the devices that hold each parameter and buffer.
    reads: of each pipeline, of each of its stages, the names of the parameters that its ops read.
    buckets: of gradients. Where parameters are sharded no bucket is read by stages that others of it are not.
    sharded: of each bucket whose state several devices share out, by its number, how; empty where state is not sharded.
    """

    devices: tuple[str, ...]
    holdings: Holdings
    reads: tuple[tuple[frozenset[str], ...], ...]
    buckets: tuple[Bucket, ...]
    sharded: Mapping[int, ShardedBucket]

    @classmethod
    def of(cls, plan: Plan, graph: ModelGraph, *, reach: Reach = "element") -> PlannedWeights:
        """``reach``: what the optimizer must see at once; of more than elements, one device keeps all of the state of a parameter.

        Raises PlanError where stages on the same devices would cut the same parameter in different ways.
        """
        holdings = holdings_of(plan, graph)
        reads = tuple(stages_reading(pipeline, graph) for pipeline in plan.pipelines)
        readers: dict[str, tuple[tuple[int, int], ...]] = {}
        for number, stages in enumerate(reads if plan.zero > 2 else ()):
            for stage, names in enumerate(stages):
                for name in names:
                    readers[name] = (*readers.get(name, ()), (number, stage))
        buckets = gradient_buckets(graph, plan.bucket_bytes, holdings, readers)
        shares = state_shares(plan)
        return cls(
            devices=plan.devices,
            holdings=holdings,
            reads=reads,
            buckets=buckets,
            sharded={
                bucket.index: sharded_bucket(bucket, graph, shares, whole_weights=reach != "element")
                for bucket in (buckets if plan.zero else ())
                if len(bucket.owners) > 1
            },
        )

    @cached_property
    def boxes(self) -> dict[str, dict[str, Box]]:
        """For each device, of the parameters and buffers that it has a part of, which."""
        found: dict[str, dict[str, Box]] = {device: {} for device in self.devices}
        for name, of in self.holdings.items():
            for device, box in of.items():
                if box:
                    found[device][name] = box
        return found

    @cached_property
    def state_parts(self) -> dict[str, float]:
        """For each device the part of what it holds of the trained weights that it updates, and keeps the state of; {}: all of it."""
        if not self.sharded:
            return {}
        whole = dict.fromkeys(self.devices, 0.0)
        own = dict(whole)
        for bucket in self.buckets:
            ranges = self.sharded[bucket.index].ranges if bucket.index in self.sharded else {}
            elements = max((stop for _, stop in ranges.values()), default=0)
            for owner in bucket.owners:
                start, stop = ranges.get(owner, (0, elements))
                whole[owner] += bucket.bytes
                own[owner] += bucket.bytes * (stop - start) / elements if elements else bucket.bytes
        return {device: own[device] / whole[device] if whole[device] else 1.0 for device in whole}
