"""Small random models on small random fleets."""

from __future__ import annotations

import random
from dataclasses import dataclass

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.predictor.software import Software
from heterodyne.search.fleet.kinds import Kind
from heterodyne.search.fleet.plan import TemplateStage
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Tables

GIB = 2**30
_TWO = ((2, 1, 1), (1, 1, 2), (1, 2, 1))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Costs by a formula of random numbers: ``speed`` of each kind, ``fixed_s`` that every pass takes, ``lost`` by a wider group,
    ``handed``: seconds of keys and values, by the sample; ``experts``: the part of the weights that is of experts; ``ways``: how many of
    the ways to share there are.
    """

    layers: tuple[str, ...]
    speed: dict[str, float]
    fixed_s: float
    lost: float
    backward: float
    head: float
    kept: float
    weights: float
    most: int = 4
    handed: float = 0.1
    experts: float = 0.0
    ways: int = 1

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        """One of two devices, in each of the ways that they can share."""
        return (Widths(), *map(Widths._make, _TWO[: self.ways])) if device_kind in self.speed else ()

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        if (
            widths not in self.widths(device_kind)
            or micro_batch % widths.data
            or micro_batch // widths.data > self.most
        ):
            return None
        width, own = widths.tensor, micro_batch / widths.copies
        work = {"embedding": 0.1, "block": 1.0, "head": self.head}[layer_kind]
        forward_s = self.fixed_s + work * own / self.speed[device_kind] / width**self.lost
        forward_s += self.handed * work * own if widths.context > 1 else 0.0
        dense, experts = 1 - self.experts, self.experts
        size = self.weights * GIB * (1.0 if layer_kind == "block" else 2.0)
        weights = int(size * (dense / width + experts / widths.devices))
        kept = int(self.kept * GIB * own * work / width)
        return LayerCost(
            forward_s=forward_s,
            backward_s=self.backward * forward_s,
            update_s=0.02 * (dense / width + experts / widths.devices),
            parameter_bytes=weights,
            gradient_bytes=weights,
            optimizer_bytes=2 * weights,
            kept_bytes=kept,
            kept_bytes_recomputed=kept // 6,
            output_bytes=int(0.02 * GIB * micro_batch),
            workspace_bytes=int(0.02 * GIB * own),
            expert_bytes=int(size * experts / widths.devices),
        )


def drawn(chance: random.Random, *, devices: int = 6, blocks: int = 8, ways: int = 1) -> tuple[Fleet, Drawn, int]:
    """A fleet of one to three kinds, a model and a global batch; ``ways``: in how many the two devices of a stage may share its work."""
    kinds = chance.choice([1, 2, 2, 2, 3])
    pools = []
    left = devices
    for number in range(kinds):
        per_node = chance.choice([1, 2])
        most = max(1, (left - (kinds - number - 1)) // per_node)
        nodes = chance.randint(1, min(most, 3))
        left -= nodes * per_node
        gbps = chance.choice([0.2, 1.0, 8.0])
        pools.append(
            Pool(
                name=f"pool-{number}",
                kind=f"kind-{number}",
                nodes=nodes,
                devices_per_node=per_node,
                memory_bytes=int(chance.choice([8, 12, 24]) * GIB),
                inside=Wire(bandwidth_bytes_per_s=20 * gbps * 1e9, latency_s=1e-4),
                between=Wire(bandwidth_bytes_per_s=gbps * 1e9, latency_s=1e-3),
                usd_per_device_hour=chance.uniform(0.5, 4.0),
                watts_per_device=chance.uniform(100.0, 700.0),
            )
        )
        if left <= kinds - number - 1:
            break
    layers = ("embedding", *["block"] * chance.randint(2, blocks), "head")
    costs = Drawn(
        layers=layers,
        speed={pool.kind: chance.uniform(1.0, 6.0) for pool in pools},
        fixed_s=chance.choice([0.0, 0.05, 0.2]),
        lost=chance.uniform(0.5, 1.0),
        backward=chance.uniform(1.5, 2.5),
        head=chance.choice([0.5, 2.0]),
        kept=chance.choice([0.02, 0.1, 0.4]),
        weights=chance.choice([0.02, 0.1, 0.3]),
        ways=ways,
        experts=chance.choice([0.0, 0.7]) if ways > 1 else 0.0,
    )
    return Fleet(name="small", pools=tuple(pools)), costs, chance.choice([4, 8, 24, 64])


def stage_of(kind: Kind, start: int, stop: int, *, recompute: bool) -> TemplateStage:
    return TemplateStage(pool=kind.name, widths=kind.widths, start=start, stop=stop, recompute=recompute)


def search_of(
    fleet: Fleet, costs: Drawn, global_batch: int, space: Space | None = None, *, waits: bool = False
) -> Search:
    """``waits``: for messages between stages, and for gradients, which are exchanged in the open."""
    predictor = Predictor(
        fleet=fleet,
        tables=Tables(costs),
        global_batch=global_batch,
        software=Software(overlap_sends=not waits, overlap_gradients=not waits),
    )
    return Search(predictor=predictor, space=space or Space())
