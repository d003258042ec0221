"""Fleets and layer tables that the planner's benchmarks share.

Links are the largest bandwidths that the layer profiles state for the devices; what they do not state, and prices, are list figures.
Tables of models that were not measured follow from FLOPs and bytes alone: they are for the time that planning takes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from results import ROOT

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import LayerCost, Widths

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Published figures; ``share``: of the peak that a large product reaches; prices in usd for an hour."""

    flops: float
    memory: int
    inside: float
    between: float
    usd: float
    watts: float
    per_node: int = 4
    share: float = 0.45


GPUS = {
    "A100-40": Gpu(flops=312e12, memory=40, inside=243.2e9, between=6.036e9, usd=3.67, watts=400),
    "V100-16": Gpu(flops=125e12, memory=16, inside=68.2e9, between=5.787e9, usd=2.48, watts=300),
    "GH-96": Gpu(flops=989e12, memory=96, inside=250.6e9, between=92.55e9, usd=5.0, watts=700),
    "A100-80": Gpu(flops=312e12, memory=80, inside=243.2e9, between=13.54e9, usd=5.03, watts=400),
    "H100-80": Gpu(flops=989e12, memory=80, inside=450e9, between=50e9, usd=8.0, watts=700, per_node=8),
    "H200-141": Gpu(flops=989e12, memory=141, inside=450e9, between=50e9, usd=9.0, watts=700, per_node=8),
    "L40S-48": Gpu(flops=362e12, memory=48, inside=32e9, between=12.5e9, usd=2.0, watts=350, per_node=8),
    "B200-180": Gpu(flops=2250e12, memory=180, inside=900e9, between=100e9, usd=14.0, watts=1000, per_node=8),
}


def fleet_of(counts: dict[str, int]) -> Fleet:
    """So many devices of each kind in one place."""
    pools = []
    for kind, count in counts.items():
        gpu = GPUS[kind]
        nodes, rest = divmod(count, gpu.per_node)
        assert not rest, f"{count} {kind} do not fill nodes of {gpu.per_node}"
        pools.append(
            Pool(
                name=kind,
                kind=kind,
                nodes=nodes,
                devices_per_node=gpu.per_node,
                memory_bytes=gpu.memory * GIB,
                inside=Wire(bandwidth_bytes_per_s=gpu.inside, latency_s=1e-5),
                between=Wire(bandwidth_bytes_per_s=gpu.between, latency_s=3e-5),
                usd_per_device_hour=gpu.usd,
                watts_per_device=gpu.watts,
            )
        )
    return Fleet(name=" + ".join(f"{n} {kind}" for kind, n in counts.items()), pools=tuple(pools))


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A transformer from its sizes, in bf16 with Adam in fp32: as `LayerCosts`, by FLOPs over a share of the peak.

    Args:
        active: parameters of a block that a token passes; ``stored``: all of them.
    """

    blocks: int
    hidden: int
    active: float
    stored: float
    vocabulary: int
    sequence: int = 4096

    @property
    def layers(self) -> tuple[str, ...]:
        return ("embedding", *["block"] * self.blocks, "head")

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        return tuple(Widths(tensor=w) for w in (1, 2, 4, 8) if w <= GPUS[device_kind].per_node)

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        if micro_batch > 16 or widths not in self.widths(device_kind):
            return None
        width = widths.tensor
        gpu = GPUS[device_kind]
        tokens = micro_batch * self.sequence
        table = self.vocabulary * self.hidden
        stored = self.stored if layer_kind == "block" else table
        active = {"embedding": 0.0, "block": self.active, "head": table}[layer_kind]
        output = 2 * tokens * self.hidden
        # Two all-reduces of the activations in each direction.
        meet_s = 4 * (width - 1) / width * output / gpu.inside if layer_kind == "block" else 0.0
        forward_s = 2 * active * tokens / width / (gpu.flops * gpu.share) + meet_s + 2e-5 + 3 * output / width / 1.5e12
        kept = {"embedding": output, "block": 17 * output, "head": 2 * output + 6 * tokens * self.vocabulary}[
            layer_kind
        ]
        return LayerCost(
            forward_s=forward_s,
            backward_s=2 * forward_s,
            update_s=16 * stored / width / 1.5e12,
            parameter_bytes=int(2 * stored / width),
            gradient_bytes=int(4 * stored / width),
            optimizer_bytes=int(12 * stored / width),
            kept_bytes=int(kept / width),
            kept_bytes_recomputed=output,
            output_bytes=output,
            workspace_bytes=2 * output,
            reduced_bytes=int(2 * stored / width),
        )


LLAMA_70B = Formula(blocks=80, hidden=8192, active=856e6, stored=856e6, vocabulary=128256)
MOE_1800B = Formula(blocks=120, hidden=12288, active=2.3e9, stored=15e9, vocabulary=100352)


def with_profiles(description: str | None) -> argparse.Namespace:
    """The arguments of every benchmark, and ``--profiles FILE``."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a form of at most two minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as JSON")
    parser.add_argument(
        "--profiles",
        type=Path,
        metavar="FILE",
        default=ROOT.parent / "shared" / "data" / "layer_profiles.json",
        help="measured layers",
    )
    options = parser.parse_args()
    if not options.profiles.exists():
        sys.exit(f"there is no file of layer profiles at {options.profiles}: name one with --profiles FILE")
    return options
