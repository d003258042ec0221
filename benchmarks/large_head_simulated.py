"""A head of 100,000 classes on 8, 16 and 32 V100s, simulated: replicated with the rest, or split beside a replicated backbone.

What Whale measured (figure 13: 1.13x, 1.66x and 2.43x over data parallelism), predicted from datasheets: a ResNet-50 with 100,000
classes, nodes of 8 V100s on NVLink, and 50 Gb/s Ethernet between the nodes. No V100 was measured for this: the seconds of an op are its
operations at a part of the peak, or its memory traffic at a part of the bandwidth, whichever takes longer. The batch of figure 13 is not
told in the paper; it is 64 images a device here. Links are taken to do what they promise: what congestion cost those runs is not in
these numbers. Group norms stand for BatchNorm, whose statistics over all devices would be exact here and were local there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from large_head import DATA, HYBRID, data, hybrid, ways_to_split
from results import Results, arguments

from heterodyne.cluster.catalog import catalog
from heterodyne.cluster.profile import BlockSample, DeviceProfile, Profile
from heterodyne.cluster.spec import Cluster, Device, Link
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.plan.lower import lower
from heterodyne.plan.plan import Plan
from heterodyne.sim.run import simulate

if TYPE_CHECKING:
    import torch

    from heterodyne.graph.ir import ModelGraph, Op

KIND = "V100-SXM2-16GB"
WHALE = {8: 1.13, 16: 1.66, 32: 2.43}
A_NODE = 8
ETHERNET = Link(between=("n0", "n1"), bandwidth_bytes_per_s=50e9 / 8, latency_s=20e-6)
NVLINK_LATENCY_S = 5e-6
COMPUTE, MEMORY = 0.6, 0.8
"""Parts of the datasheet's peak and bandwidth that are reached."""
CLASSES, IMAGES = 100_000, 64


def main() -> int:
    options = arguments(__doc__)
    results = Results("large_head_simulated")
    images = 8 if options.quick else IMAGES
    gains = {}
    for devices, published in WHALE.items():
        graph, cluster = capture(devices), v100s(devices)
        costs = CostModel(
            graph=graph, cluster=cluster, profile=from_datasheets(graph, cluster, images), recipe=Recipe(clip=False)
        )
        plans = {DATA: data(graph, cluster, images), HYBRID: hybrid(graph, cluster, images)}
        seconds = {way: simulated(plan, costs) for way, plan in plans.items()}
        gains[devices] = seconds[DATA] / seconds[HYBRID]
        results.row(
            f"{devices} V100s",
            data_s=seconds[DATA],
            hybrid_s=seconds[HYBRID],
            gain=gains[devices],
            published=published,
            **ways_to_split(graph, plans[HYBRID]),
        )
    results.bar("hybrid over data parallelism, 8 V100s", gains[8], ">= 1.0")
    results.bar("what it gains at 16 over what it gains at 8", gains[16] / gains[8], ">= 1.0")
    results.bar("what it gains at 32 over what it gains at 16", gains[32] / gains[16], ">= 1.0")
    return results.write(options.json)


def capture(devices: int) -> ModelGraph:
    import torch

    from heterodyne.frontend import capture as graph_of

    with torch.device("meta"):
        model = classifier(devices)
        batch = {"images": torch.empty(4, 3, 224, 224), "labels": torch.zeros(4, dtype=torch.int64)}
    return graph_of(model, batch)


def classifier(devices: int) -> torch.nn.Module:
    from torch import nn
    from torch.nn import functional as F
    from transformers import ResNetConfig, ResNetModel

    import heterodyne as hd

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = ResNetModel(ResNetConfig())  # by default a ResNet-50
            for module in list(self.backbone.modules()):
                for name, child in module.named_children():
                    if isinstance(child, nn.BatchNorm2d):
                        setattr(module, name, nn.GroupNorm(32, child.num_features))
            self.head = nn.Linear(2048, CLASSES)

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with hd.replicate(devices):
                features = self.backbone(images).pooler_output.flatten(1)
            with hd.split(devices):
                return F.cross_entropy(self.head(features), labels)

    return Classifier()


def v100s(count: int) -> Cluster:
    entry = catalog()[KIND]
    nodes = [f"n{number}" for number in range(-(-count // A_NODE))]
    inside = entry.link_bandwidth_bytes_per_s
    assert inside is not None
    links = [Link(between=(node, node), bandwidth_bytes_per_s=inside, latency_s=NVLINK_LATENCY_S) for node in nodes]
    for place, node in enumerate(nodes):
        links += [
            Link(
                between=(node, other),
                bandwidth_bytes_per_s=ETHERNET.bandwidth_bytes_per_s,
                latency_s=ETHERNET.latency_s,
            )
            for other in nodes[place + 1 :]
        ]
    devices = tuple(
        Device(id=f"{node}/{KIND}:{place}", kind=KIND, node=node, memory_bytes=entry.memory_bytes or 0, backend="cuda")
        for node in nodes
        for place in range(min(A_NODE, count))
    )
    return Cluster(name=f"{count} V100s", devices=devices, links=tuple(links))


def from_datasheets(graph: ModelGraph, cluster: Cluster, images: int) -> Profile:
    """The same for every device, at the sizes of micro-batches that a device has: its own, and as many as all have together."""
    sizes = (images, images * len(cluster.devices))
    kinds = {block.kind: block for block in graph.blocks}
    blocks = {}
    for kind, block in kinds.items():
        ops = graph.ops_of(block)
        blocks[kind] = tuple(
            BlockSample(
                micro_batch_size=size,
                forward_s=seconds_of(ops, size, backward=False),
                backward_s=seconds_of(ops, size, backward=True),
                spread=0.0,
                saved_bytes=sum(int(op.bytes_saved(size)) for op in ops),
            )
            for size in sizes
        )
    bandwidth = catalog()[KIND].memory_bandwidth_bytes_per_s
    assert bandwidth is not None
    # AdamW reads weight, gradient and both moments, and writes all but the gradient.
    device = DeviceProfile(blocks=blocks, optimizer_s_per_byte=7 / (MEMORY * bandwidth))
    return Profile(key="from datasheets", devices={d.id: device for d in cluster.devices})


def seconds_of(ops: Sequence[Op], size: int, *, backward: bool) -> float:
    entry = catalog()[KIND]
    peak, bandwidth = entry.peak_flops["fp32"], entry.memory_bandwidth_bytes_per_s
    assert bandwidth is not None
    total = 0.0
    for op in ops:
        flops = (op.flops_backward if backward else op.flops_forward)(size)
        traffic = (2 if backward else 1) * (op.bytes_read(size) + op.bytes_written(size))
        total += max(flops / (COMPUTE * peak), traffic / (MEMORY * bandwidth))
    return total


def simulated(plan: Plan, costs: CostModel) -> float:
    return simulate(lower(plan, costs.graph, costs.cluster, clip=False).program, costs.of(plan)).step_s


if __name__ == "__main__":
    sys.exit(main())
