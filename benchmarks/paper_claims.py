"""What Whale and HetHub claim for unlike accelerators, planned from datasheets: the gain of shares by speed over equal ones, and how close
a mixed fleet comes to the sum of what its kinds do alone.

The papers do not tell all that a prediction needs; what is ours is said in each row. Ratios are of predicted steps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from results import Results, arguments

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import LayerCost, LayerCosts, Widths
from heterodyne.predictor.datasheet_times import graph_layers
from heterodyne.predictor.devices import chip_of
from heterodyne.predictor.kernels import Kernels, Product
from heterodyne.predictor.layer_costs import predicted_layers
from heterodyne.predictor.roofline import kernels_s
from heterodyne.predictor.software import Software
from heterodyne.predictor.transformer import Transformer
from heterodyne.search.fleet.plan import Template, TemplateStage, mix_of
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.space import Space

if TYPE_CHECKING:
    from heterodyne.graph.ir import ModelGraph

V100, P100 = "V100-SXM2-32GB", "P100-SXM2-16GB"
ETHERNET = Wire(bandwidth_bytes_per_s=50e9 / 8, latency_s=20e-6)
INFINIBAND = Wire(bandwidth_bytes_per_s=100e9, latency_s=10e-6)
"""Of a node: 8 cards of 100 Gb/s."""
BERT = Transformer(layers=24, hidden=1024, heads=16, vocab=30522, seq=128, ffn=4096, causal=False, predicted=20 / 128)
T5_LARGE = Transformer(layers=48, hidden=1024, heads=16, vocab=32128, seq=512, ffn=4096)
"""24 layers in the encoder and as many in the decoder."""
LLAMA_140B = Transformer(
    layers=80, hidden=12288, heads=96, kv_heads=96, vocab=32000, seq=4096, ffn=32768, gated=True, tied=False
)
PAPER_DATA = {"ResNet50": 1.30, "GNMT": 1.27, "BertLarge": 1.45}
PAPER_PIPELINE = {"BertLarge": 1.23, "T5-Large": 1.23}
FP32 = Software(flash=False, fused_loss=False)


def main() -> int:
    options = arguments(__doc__)
    results = Results("paper_claims")
    fleet = mixed({V100: 8, P100: 8})
    models = {
        "ResNet50": graph_layers(resnet(), fleet, software=FP32),
        "GNMT": Recurrent(fleet=fleet),
        "BertLarge": predicted_layers(BERT, fleet, precision="fp32", software=FP32),
    }
    for name, costs in models.items():
        gain = over_equal_batches(fleet, costs)
        why = "by datasheet a V100 does 1.48 times the fp32 of a P100: 1.24 at most; the batch (64 a device is ours) is not told"
        results.row(f"8 V100 + 8 P100, data parallel, {name}", gain=gain, paper=PAPER_DATA[name], why=why)
        results.bar(f"shares by speed over equal batches, {name}", gain, ">= 1.2")
    fleet = mixed({V100: 4, P100: 4})
    for name, model in (("BertLarge", BERT), ("T5-Large", T5_LARGE)):
        gain = over_even_cut(fleet, predicted_layers(model, fleet, precision="fp32", software=FP32), model.layers)
        why = "8 stages and 32 micro-batches are ours; the papers' cut is not told"
        results.row(f"4 V100 + 4 P100, pipeline, {name}", gain=gain, paper=PAPER_PIPELINE[name], why=why)
        results.bar(f"stages by speed over an even cut, {name}", gain, ">= 1.2")
    share = of_the_bound(quick=options.quick)
    why = "kinds, batch and links are ours: 128 A100-80 and 640 MI250X devices; the bound is the sum of both planned alone"
    results.row("768 accelerators, Llama-140B", share_of_bound=share, paper=0.9749, why=why)
    results.bar("768 accelerators of two kinds over the sum of their parts", share, ">= 0.975")
    return results.write(options.json)


def mixed(count: Mapping[str, int]) -> Fleet:
    """A node of each kind."""
    memory = {V100: 32 * 10**9, P100: 16 * 10**9}
    inside = {
        V100: Wire(bandwidth_bytes_per_s=150e9, latency_s=5e-6),
        P100: Wire(bandwidth_bytes_per_s=80e9, latency_s=5e-6),
    }
    pools = tuple(
        Pool(name=kind[:4], kind=kind, nodes=1, devices_per_node=n, memory_bytes=memory[kind], inside=inside[kind])
        for kind, n in count.items()
    )
    return Fleet(name="mixed", pools=pools, links={("V100", "P100"): ETHERNET})


def over_equal_batches(fleet: Fleet, costs: LayerCosts, each: int = 64) -> float:
    """``each`` samples a device, in one go, over the shares of the same batch at which all devices are ready soonest.

    Gradients take as long either way, and hide behind the backward or not; they are not counted.
    """
    pools = fleet.pools

    def seconds(kind: str, samples: int) -> float:
        found = [costs.cost(kind, layer, Widths(), samples) for layer in costs.layers] if samples else []
        return sum(cost.forward_s + cost.backward_s for cost in found if cost is not None)

    first, second = pools
    shares = ((n, 2 * each - n) for n in range(each, 2 * each + 1))  # of a device of either kind; as many of both
    best_s = min(max(seconds(first.kind, n), seconds(second.kind, m)) for n, m in shares)
    return max(seconds(pool.kind, each) for pool in pools) / best_s


def over_even_cut(fleet: Fleet, costs: LayerCosts, blocks: int, batch: int = 128, micro_batch: int = 4) -> float:
    """One pipeline over all devices: as many blocks a stage as the others, over the best cut."""
    planner = FleetPlanner(fleet=fleet, costs=costs, global_batch=batch)
    space = Space(max_pipelines=1, max_width=1, micro_batches=(micro_batch,))
    predictor = planner.search(space).predictor
    stages, each, last = [], blocks // fleet.devices, fleet.devices - 1
    devices = [pool.name for pool in fleet.pools for _ in range(pool.devices)]
    for number, device in enumerate(devices):
        start = 0 if number == 0 else 1 + number * each
        stop = len(costs.layers) if number == last else 1 + (number + 1) * each
        stages.append(TemplateStage(pool=device, start=start, stop=stop))
    even = predictor.evaluate(mix_of([(Template(micro_batch=micro_batch, stages=tuple(stages)), 1)]))
    assert even is not None
    return even.predicted.step_s / planner.plan(space=space).best.predicted.step_s


def of_the_bound(*, quick: bool) -> float:
    scale = 4 if quick else 1
    kinds = {"A100-SXM-80GB": (16 // scale, 80, 300e9), "MI250X": (80 // scale, 64, 200e9)}
    pools = tuple(
        Pool(
            name=kind, kind=kind, nodes=nodes, devices_per_node=8, memory_bytes=gb * 10**9,
            inside=Wire(bandwidth_bytes_per_s=inside, latency_s=5e-6), between=INFINIBAND,
        )
        for kind, (nodes, gb, inside) in kinds.items()
    )  # fmt: skip
    fleet = Fleet(name="768", pools=pools, links={("A100-SXM-80GB", "MI250X"): INFINIBAND})
    costs = predicted_layers(LLAMA_140B, fleet)

    def samples_per_s(of: Fleet) -> float:
        return FleetPlanner(fleet=of, costs=costs, global_batch=3072).plan().best.predicted.samples_per_s

    alone = [samples_per_s(replace(fleet, pools=(pool,), links={})) for pool in fleet.pools]
    return samples_per_s(fleet) / sum(alone)


def resnet() -> ModelGraph:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from transformers import ResNetConfig, ResNetModel

    from heterodyne.frontend import capture

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = ResNetModel(ResNetConfig())  # by default a ResNet-50
            self.head = nn.Linear(2048, 1000)

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.backbone(images).pooler_output.flatten(1)), labels)

    with torch.device("meta"):
        batch = {"images": torch.empty(4, 3, 224, 224), "labels": torch.zeros(4, dtype=torch.int64)}
        return capture(Classifier(), batch)


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """GNMT as products: 16 LSTM layers of width 1024 step by step over 25 words, and a softmax over 32,000. A table of layer costs."""

    fleet: Fleet
    _made: dict[tuple[str, str, int], LayerCost] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[str, ...]:
        return (*("lstm",) * 16, "softmax")

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        return (Widths(),) if device_kind in self.fleet.kinds else ()

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        words, hidden, vocab = 25, 1024, 32000
        if widths != Widths() or micro_batch > 256:
            return None
        if layer_kind == "lstm":
            step = Product(m=micro_batch, n=4 * hidden, k=2 * hidden)
            made = Kernels(
                products=(step,) * words, moved_bytes=words * micro_batch * hidden * 4 * 12, launches=words * 2
            )
            weights = 8 * hidden * hidden
        else:
            made = Kernels(products=(Product(m=micro_batch * words, n=vocab, k=hidden),), launches=4)
            weights = vocab * hidden
        chip = chip_of(self.fleet.accelerator(device_kind), "fp32", FP32)
        forward, backward = kernels_s(made, chip, launch=0.1)  # recurrent layers are one call of a library
        return LayerCost(
            forward_s=forward, backward_s=backward, update_s=weights * 28 / chip.memory_bytes_per_s,
            parameter_bytes=4 * weights, gradient_bytes=4 * weights, optimizer_bytes=8 * weights,
            kept_bytes=words * micro_batch * hidden * 4 * 8, kept_bytes_recomputed=words * micro_batch * hidden * 4,
            output_bytes=words * micro_batch * hidden * 4,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
