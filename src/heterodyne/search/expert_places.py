"""Attention on some devices, experts on others: pipelines of two places whose stages alternate.

A model with mixtures of experts is cut before and behind each of them. What stands between stays on one place, the experts are on the
other one (HeterMoE, Wu et al., 2025), so devices do what they are good at, and weights of experts are where there is memory for them.
Tokens cross twice a layer; several micro-batches keep both places at work. Experts of some layers stay with the attention where that
evens out what the two places have to do.

Which devices are which place: those go to the experts first that are best at them beside the rest (comparative advantage); among equals the
slow ones, or the fast ones. How the experts lie on a place of several devices, how many stay, and the order are left to the cost model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import inf

from heterodyne.cost.layers import Way
from heterodyne.cost.model import CostModel
from heterodyne.errors import PlanError
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.plan import Pipeline
from heterodyne.search.by_speed import shares_by
from heterodyne.search.planned import CUTTING_PAYS, FOLDING_PAYS, Candidate
from heterodyne.search.predict import stage_of
from heterodyne.search.refine import Refiner
from heterodyne.search.split import Split
from heterodyne.units import counted, format_bytes, format_seconds

__all__ = ["ExpertPlaces"]

_MOST, _MOST_OF_EACH = 4, 2
"""Placements that can be and are simulated, and those of one division of the devices: what an order has to hold is not known before."""


@dataclass(frozen=True, kw_only=True)
class _Placement:
    """``way``: in which the experts lie on their place, None: each device has all that are there, and samples of its own; ``size``: of
    micro-batches; ``stay``: the mixtures whose experts are with the attention; ``least_s``: no order takes less.
    """

    attention: tuple[str, ...]
    experts: tuple[str, ...]
    way: Way | None
    size: int
    stay: frozenset[int]
    least_s: float


@dataclass(frozen=True, kw_only=True)
class ExpertPlaces:
    """``split``: builds and weighs stages; ``able``: what runs for the model; ``refiner``: finds orders."""

    split: Split
    able: Capabilities
    refiner: Refiner
    _seconds: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def mixtures(self) -> tuple[int, ...]:
        """The ops that are mixtures of experts."""
        return tuple(number for number, op in enumerate(self._model.graph.ops) if op.kind == "experts")

    def candidates(self, below_s: float = inf) -> tuple[Candidate, ...]:
        """The best of each way in which the experts may lie; none for a model without mixtures. ``below_s``: what a plan has to be
        weighed below to be worth making."""
        if not self.mixtures or not self.able.allow("several_stages", "several_micro_batches"):
            return ()
        placements = sorted(self._placements(), key=lambda placement: placement.least_s)
        name = "attention and experts on places of their own"
        if not placements:
            return (Candidate(name=name, kind="pipeline", why_not=self._lacking()),)
        found: list[Candidate] = []
        tried: Counter[tuple[str, ...]] = Counter()
        for placement in placements:
            there = sum(candidate.plan is not None for candidate in found)
            wanted = there < _MOST and tried[placement.experts] < _MOST_OF_EACH
            if wanted and placement.least_s / CUTTING_PAYS / FOLDING_PAYS < below_s:
                tried[placement.experts] += 1
                found.append(self._played(placement))
                below_s = min(below_s, found[-1].weighed_s)
        if not found:
            why = f"takes at least {format_seconds(placements[0].least_s)} a step"
            return (Candidate(name=name, kind="pipeline", why_not=why),)
        best: dict[str, Candidate] = {}
        for candidate in sorted(found, key=lambda c: c.weighed_s):
            best.setdefault(candidate.kind, candidate)
        return tuple(best.values())

    def _placements(self) -> Iterator[_Placement]:
        """For each division of the devices, each way and each size of micro-batches the share of the experts that leaves the least to wait
        for, of those whose weights fit."""
        layers = len(self.mixtures)
        for (attention, experts), size in product(self._divisions(), self.split.sizes):
            count = -(-self.split.samples // size)
            rest_s, of_attention_s = self._of_place(attention, size)
            experts_s = self._of_place(experts, size)[1]

            def longest_s(
                stay: int, rest: float = rest_s, own: float = of_attention_s / layers, other: float = experts_s / layers
            ) -> float:
                return max(rest + stay * own, (layers - stay) * other)

            for way in self._ways(experts) if count > 1 else ():
                stay = min(
                    (n for n in range(layers) if self._have_room(attention, experts, way, n, size)),
                    key=longest_s,
                    default=None,
                )
                if stay is not None:
                    yield _Placement(
                        attention=attention,
                        experts=experts,
                        way=way,
                        size=size,
                        stay=frozenset(n for n in range(layers) if (n + 1) * stay // layers > n * stay // layers),
                        least_s=count * longest_s(stay),
                    )

    def _divisions(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Devices for the attention and devices for the experts."""
        size = self.split.sizes[-1]
        seconds = {device.id: self._of_device(device.id, size) for device in self._model.cluster.devices}
        found = set()
        for fast_first in (1, -1):

            def rank(device: str, sign: int = fast_first) -> tuple[float, float]:
                rest, experts = seconds[device]
                return -round(experts / rest if rest > 0 else 0.0, 2), sign * (rest + experts)

            ranked = sorted(seconds, key=rank)
            for n in range(1, len(ranked)):
                attention = tuple(device for device in seconds if device in ranked[:n])
                experts = tuple(device for device in seconds if device not in attention)
                if attention not in found:
                    found.add(attention)
                    yield attention, experts

    def _of_device(self, device: str, size: int) -> tuple[float, float]:
        """Seconds of forward and backward of a micro-batch, in all but the experts and in the experts."""
        if (device, size) not in self._seconds:
            compute = self._model.compute[device]
            experts = sum(
                compute.seconds(kind, (at, at + 1), size) for at in self.mixtures for kind in ("F", "B") if size
            )
            self._seconds[device, size] = max(0.0, compute.micro_batch_s(size) - experts), experts
        return self._seconds[device, size]

    def _of_place(self, devices: Sequence[str], size: int) -> tuple[float, float]:
        """The same of devices that share a micro-batch by their speeds."""
        each = [self._of_device(device, size) for device in devices]
        rest, experts = (sum(1 / max(own[part], 1e-12) for own in each) for part in (0, 1))
        return 1 / rest, 1 / experts

    def _ways(self, experts: Sequence[str]) -> tuple[Way | None, ...]:
        return (None, "split") if len(experts) > 1 and self.able.allow("tensor_parallel") else (None,)

    def _played(self, placement: _Placement) -> Candidate:
        """With the order that is found to be the shortest."""
        pipeline, way = self._pipeline(placement), placement.way
        stay = counted(len(placement.stay), "layer")
        name = f"attention on {', '.join(placement.attention)}, experts on {', '.join(placement.experts)}" + (
            f", those of {stay} with the attention" if placement.stay else ""
        )
        kind = "pipeline" if way is None else way
        try:
            orders = list(self.refiner.variants(pipeline))
        except PlanError as error:
            return Candidate(name=name, kind=kind, why_not=str(error))
        if not orders:
            lacks = "no order fits the memory of both places, one micro-batch at a time and with recompute either"
            return Candidate(name=name, kind=kind, why_not=lacks)
        built = min((built for built, _ in orders), key=lambda built: built.makespan_s)
        return self.split.weighed(name, kind, (built.pipeline,), schedule=built.schedule or "1F1B", shifts=False)

    def _pipeline(self, placement: _Placement) -> Pipeline:
        size, way = placement.size, placement.way
        moved = [at for number, at in enumerate(self.mixtures) if number not in placement.stay]
        borders = [0, *(border for at in moved for border in (at, at + 1)), len(self._model.graph.ops)]
        shares = [
            shares_by([1 / max(self._of_device(device, size)[part], 1e-12) for device in devices])
            for part, devices in enumerate((placement.attention, placement.experts))
        ]

        of_experts = (
            stage_of((0, 1), placement.experts, shares[1])
            if way is None
            else self.split.stage((0, 1), placement.experts, way, shares[1])
        )
        of_places = (stage_of((0, 1), placement.attention, shares[0]), of_experts)
        stages = tuple(of_places[n % 2].model_copy(update={"ops": ops}) for n, ops in enumerate(pairwise(borders)))
        return Pipeline(micro_batches=self.split.micro_batches(self.split.samples, size), stages=stages)

    def _have_room(
        self, attention: Sequence[str], experts: Sequence[str], way: Way | None, stay: int, size: int
    ) -> bool:
        """Return whether weights, their gradients, the optimizer's state and the activations of one micro-batch fit where the experts of so
        many layers stay."""
        graph, held = self._model.graph, 2 + self._model.recipe.states
        part = 1 - stay / len(self.mixtures)
        moved = sum(self._mixture_bytes) * part
        for devices, weights, kept, whole in (
            (attention, graph.parameter_bytes - moved, 1 - self._kept_by_experts * part, True),
            (experts, moved, self._kept_by_experts * part, way is None),
        ):
            rooms = [
                self._room(device) - kept * self._model.device_memory[device].activations(-(-size // len(devices)))
                for device in devices
            ]
            if held * weights > (min(rooms) if whole else sum(rooms)):
                return False
        return True

    @cached_property
    def _kept_by_experts(self) -> float:
        """Of what is kept from forward to backward the part that the experts keep."""
        ops = self._model.graph.ops
        whole = sum(op.bytes_saved(1) for op in ops)
        return sum(ops[at].bytes_saved(1) for at in self.mixtures) / whole if whole else 0.0

    def _room(self, device: str) -> int:
        return max(0, self._model.device_memory[device].usable_bytes)

    @cached_property
    def _mixture_bytes(self) -> tuple[int, ...]:
        """Of the weights of each mixture."""
        graph = self._model.graph
        names = (set(graph.ops[at].parameters) for at in self.mixtures)
        return tuple(sum(p.bytes for p in graph.parameters if p.name in own) for own in names)

    def _lacking(self) -> str:
        if all(self.split.samples <= size for size in self.split.sizes):
            return "the batch is one micro-batch: one place would wait while the other computes"
        graph, held = self._model.graph, 2 + self._model.recipe.states
        names = [name for name in graph.ops[self.mixtures[0]].parameters if name in graph.stored]
        experts = graph.stored[names[-1]].shape[0]
        layer, rest = max(self._mixture_bytes), graph.parameter_bytes - sum(self._mixture_bytes)
        of_layer, of_one, of_rest = (format_bytes(int(held * size)) for size in (layer, layer / experts, rest))
        ranked = sorted((device.id for device in self._model.cluster.devices), key=self._room)
        ends = (f"{format_bytes(self._room(device))} on {device}" for device in dict.fromkeys((ranked[0], ranked[-1])))
        return (
            f"with gradients and the optimizer's state the experts of a layer take {of_layer}, one of them {of_one}, and all else "
            f"{of_rest}, and beside the framework there is room for {' to '.join(ends)}: give the experts' place more memory, or take an "
            "optimizer with less state"
        )

    @property
    def _model(self) -> CostModel:
        return self.split.model
