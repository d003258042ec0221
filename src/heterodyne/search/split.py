"""Plans with sharded stages: as the author of the model has marked them, or found by search.

Sharding costs collectives inside every layer and saves memory and waiting: sharded weights exist once, and all devices of a stage finish
at the same time. Widths go by speed, as in Whale's intra-TaskGraph balance (section 4.2), here by the measured speed on this model. The
layouts follow from the graph (`heterodyne.graph.sharding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from heterodyne.cost.layers import WAYS, Way
from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.graph.sharding.dealing import dealt_to_all
from heterodyne.graph.task_graphs import TaskGraph, task_graph_runs
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Exchange, Layout, Pipeline, Plan, Region, Stage
from heterodyne.plan.virtual_devices import virtual_devices
from heterodyne.search.by_speed import causal_shares, lighter_pipelines, shares_by
from heterodyne.search.dispatch import with_cheaper_dispatch
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import CUTTING_PAYS, IN_TURNS_PAYS, Candidate, Kind
from heterodyne.search.predict import plan_of, weighed, with_stages
from heterodyne.search.relieved import relieved
from heterodyne.search.split_bound import SplitBound
from heterodyne.sim.run import Simulation
from heterodyne.units import format_seconds

__all__ = ["Split"]

_MOST_BYTES: Final = 2e9  # that a plan may say of a latency
_NAMES: Final = {"split": "weights split", "context": "sequences split"}


@dataclass(frozen=True, kw_only=True)
class Split:
    """Args:
    runs: of the devices that can hold the whole model, by which their speeds are known best.
    samples: the global batch; sizes: of micro-batches that are tried.
    count: the number of micro-batches that everyone must have, None where it is free (see `search.proposals`).
    """

    model: CostModel
    runs: Mapping[str, MicroBatchChoice]
    samples: int
    sizes: tuple[int, ...]
    count: int | None = None

    def as_marked(self) -> tuple[Candidate, ...]:
        """The plans that the model's TaskGraphs ask for, one a size of micro-batch; none if nothing is marked.

        Raises PlanError where their counts do not go with the devices.
        """
        graph = self.model.graph
        runs = [run.task_graph for run in task_graph_runs(graph)]
        nodes = {device.id: device.node for device in self.model.cluster.devices}
        copies = virtual_devices(runs, nodes)
        if not copies:
            return ()
        firsts = [self._first_op(stage.task_graphs) for stage in copies[0]]
        borders = [0, *firsts[1:], len(graph.ops)]
        found = []
        for size in self.tried:
            pipelines = []
            shares = self._dealt_batch([[d for at in copy for d in at.devices] for copy in copies])
            for copy, share in zip(copies, shares, strict=True):
                stages = tuple(
                    self._marked_stage((borders[n], borders[n + 1]), at.devices, at.task_graphs)
                    for n, at in enumerate(copy)
                )
                pipelines.append(Pipeline(micro_batches=self.micro_batches(share, size), stages=stages))
            name = f"as the model is marked, micro-batches of {size}"
            found.append(self.weighed(name, "marked", tuple(pipelines)))
        return (*found, *self.overlapped(_fastest(found))) if found else ()

    def candidates(self, kinds: Sequence[str], below_s: float) -> tuple[Candidate, ...]:
        """Splits of the whole model (``split``: of its weights, ``context``: of its sequences), over all devices and over fewer, alone
        and beside copies of each other; of each the best size of micro-batches. ``below_s``: what the best other plan takes.
        """
        found: list[Candidate] = []
        for kind in WAYS:
            for name, groups in self._groupings() if kind in kinds else ():
                found.append(self._best(f"{_NAMES[kind]} {name}", kind, groups, below_s))
                below_s = min(below_s, found[-1].weighed_s)
        return tuple(found)

    def _best(self, name: str, kind: Way, groups: Sequence[Sequence[str]], below_s: float) -> Candidate:
        """Of the sizes of micro-batches that may be weighed below so many seconds."""
        why = self._bound.lacking(kind, groups)
        if why:
            return Candidate(name=name, kind=kind, why_not=why)
        # Sequences are cut where one alone is long; samples of more than one would be shared.
        least_s = {
            size: self._bound.weighed_s(kind, groups, size) for size in self.tried[: 2 if kind == "split" else 1]
        }
        tried = [
            self._of_groups(f"{name}{how}", kind, groups, shares, size)
            for how, shares in self._ways_to_share(kind, groups)
            for size, least in least_s.items()
            if least < below_s
        ]
        if not tried:
            why = f"takes at least {format_seconds(min(least_s.values()) * CUTTING_PAYS)} a step"
            return Candidate(name=name, kind=kind, why_not=why)
        own = _fastest(tried)
        # What hides is the shorter one of computing and exchanging: half at most.
        turns = self.overlapped(own) if own.weighed_s < 2 * IN_TURNS_PAYS * below_s else []
        return _fastest([own, *turns])

    def overlapped(self, candidate: Candidate) -> list[Candidate]:
        """The same with each micro-batch as two halves in turns, where it has two."""
        plan = candidate.plan
        if plan is None or not Capabilities(self.model.graph).allow("overlap"):
            return []
        if any(stage.recompute or stage.offload_activations for p in plan.pipelines for stage in p.stages):
            return []
        pipelines = tuple(
            with_stages(pipeline, lambda _, stage: stage.model_copy(update={"overlap": stage.sharded}))
            for pipeline in plan.pipelines
        )
        if not any(size > 1 for pipeline in pipelines for size in pipeline.micro_batches.sizes):
            return []
        return [
            self.weighed(
                f"{candidate.name}, one half of a micro-batch computes while the other communicates",
                candidate.kind,
                pipelines,
                schedule=plan.schedule,
            )
        ]

    def _ways_to_share(self, kind: Way, groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
        """The shares of the devices of each group: by speed, and where later tokens cost more also with that counted in."""
        speeds = [[self._speed(device) for device in group] for group in groups]
        yield "", [shares_by(of_group) for of_group in speeds]
        if kind == "context":
            causal = [causal_shares(self.model.graph, of_group) for of_group in speeds]
            known = [shares for shares in causal if shares is not None]
            if len(known) == len(groups):
                yield ", later slices shorter", known

    def _of_groups(
        self,
        name: str,
        kind: Way,
        groups: Sequence[Sequence[str]],
        shares: Sequence[tuple[int, ...]],
        size: int,
    ) -> Candidate:
        whole = (0, len(self.model.graph.ops))
        taken = self._dealt_batch(groups)
        if self.count is not None and min(taken) < self.count:
            return Candidate(name=name, kind=kind, why_not=f"a copy has too few samples for {self.count} micro-batches")
        pipelines = tuple(
            Pipeline(micro_batches=self.micro_batches(samples, size), stages=(self.stage(whole, devices, kind, own),))
            for devices, own, samples in zip(groups, shares, taken, strict=True)
        )
        return self.weighed(name, kind, pipelines)

    def stage(
        self,
        ops: tuple[int, int],
        devices: Sequence[str],
        kind: Way,
        shares: tuple[int, ...],
    ) -> Stage:
        regions = (Region(layout=Layout(kind=kind, shares=shares)),)
        return Stage(ops=ops, devices=tuple(devices), regions=regions, exchange=self.exchange(devices))

    def _groupings(self) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
        """Who is sharded together: all, the fastest, each node by itself, pairs of equals."""
        devices = [device.id for device in self.model.cluster.devices]
        ranked = sorted(devices, key=lambda device: -self._speed(device))
        for count in _counts(len(devices)):
            kept = tuple(device for device in devices if device in ranked[:count])
            yield f"over all {count} devices" if count == len(devices) else f"over {', '.join(kept)}", (kept,)
        nodes: dict[str, list[str]] = {}
        for device in self.model.cluster.devices:
            nodes.setdefault(device.node, []).append(device.id)
        if len(nodes) > 1:
            yield "inside each node", tuple(tuple(of) for of in nodes.values())
        for width in (2, 4, 8):
            if width < len(devices) and len(devices) % width == 0:
                order = sorted(devices, key=lambda d: (-round(self._speed(d), 6), devices.index(d)))
                groups = tuple(tuple(order[i : i + width]) for i in range(0, len(order), width))
                yield f"over {width} devices, {len(groups)} copies", groups

    def _dealt_batch(self, groups: Sequence[Sequence[str]]) -> tuple[int, ...]:
        speeds = [sum(self._speed(device) for device in group) for group in groups]
        return dealt_to_all(self.samples, shares_by(speeds)) if len(groups) > 1 else (self.samples,)

    def _first_op(self, task_graphs: Sequence[TaskGraph]) -> int:
        names = {task_graph.name for task_graph in task_graphs}
        return next(place for place, op in enumerate(self.model.graph.ops) if op.annotation in names)

    def _marked_stage(self, ops: tuple[int, int], devices: tuple[str, ...], task_graphs: Sequence[TaskGraph]) -> Stage:
        """What is not marked shares the samples, as a replicated TaskGraph does."""
        shares = shares_by([self._speed(device) for device in devices])
        regions = [Region(layout=Layout(kind="replicate", shares=shares))]
        regions += [
            Region(task_graph=task_graph.name, layout=Layout(kind=task_graph.kind, shares=shares))
            for task_graph in task_graphs
        ]
        return Stage(ops=ops, devices=devices, regions=tuple(regions), exchange=self.exchange(devices))

    def weighed(
        self,
        name: str,
        kind: Kind,
        pipelines: tuple[Pipeline, ...],
        *,
        schedule: str = "1F1B",
        shifts: bool = True,
    ) -> Candidate:
        """Simulated. ``shifts``: whether parts of what is sharded go to others where devices run out of memory."""

        def lighter(made: Plan, played: Simulation, _: object) -> Plan | None:
            used = {device: played.peak_bytes[self.model.cluster.rank(device)] for device in made.devices}
            found = lighter_pipelines(made.pipelines, used, self.model.cluster) if shifts else None
            return None if found is None else plan_of(self.model, self.samples, found, schedule)

        plan = plan_of(self.model, self.samples, pipelines, schedule)
        try:
            dispatched = tuple(with_cheaper_dispatch(self.model, pipeline) for pipeline in pipelines)
            made, played = relieved(self.model, plan.model_copy(update={"pipelines": dispatched}), self.runs, lighter)
        except (PlanError, InfeasibleError) as error:
            return Candidate(name=name, kind=kind, why_not=str(error), left_out=plan.idle)
        return weighed(self.model, name, kind, made, played)

    @property
    def tried(self) -> tuple[int, ...]:
        """The smallest and the largest size: what is exchanged grows with samples, and so does what hides its latency."""
        return tuple(dict.fromkeys((self.sizes[0], self.sizes[-1]))) if self.count is None else self.sizes[:1]

    def micro_batches(self, samples: int, size: int) -> MicroBatches:
        if self.count is None:
            return MicroBatches.of_samples(samples, size)
        return MicroBatches(tuple(sorted(MicroBatches.of_count(samples, self.count).sizes)))

    def _speed(self, device: str) -> float:
        """Samples/s of the whole model, whether or not it would fit."""
        return self.runs[device].rate if device in self.runs else self.model.compute[device].rate()

    def exchange(self, devices: Sequence[str]) -> Exchange:
        """The price of sending beside computing, by the slowest link between any two of the devices: it decides how tensors lie."""
        if len(devices) < 2:
            return Exchange()
        graph, collectives = self.model.graph, self.model.collectives
        met = collectives.exchange(devices)
        links = [collectives.send(a, b) for a in devices for b in devices if a != b] if met is None else [met]
        s_per_byte = max(link.s_per_byte for link in links)
        if s_per_byte <= 0:
            return Exchange(latency_bytes=0, flops_per_byte=1)
        flops_per_s = (graph.flops_forward()(1) + graph.flops_backward()(1)) * sum(map(self._speed, devices))
        return Exchange(
            latency_bytes=_rounded(min(_MOST_BYTES, max(link.latency_s for link in links) / s_per_byte)),
            flops_per_byte=max(1, _rounded(flops_per_s * s_per_byte)),
        )

    @cached_property
    def _bound(self) -> SplitBound:
        return SplitBound(
            model=self.model,
            samples=self.samples,
            in_turns=Capabilities(self.model.graph).allow("overlap"),
            stage=self.stage,
        )


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: c.weighed_s)


def _counts(devices: int) -> list[int]:
    """Of how many devices: of all, without the slowest, of half of them and of two. Each takes a while to work out."""
    return sorted({devices, devices - 1, devices // 2, 2} - {0, 1}, reverse=True)


def _rounded(value: float) -> int:
    """Two digits: what is measured is not known better, and a plan should read the same after every measurement."""
    if value < 10:
        return round(value)
    digits = len(str(int(value))) - 2
    return int(round(value / 10**digits) * 10**digits)
