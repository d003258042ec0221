"""Fleets and layer tables that the planner's benchmarks share.

Links are the largest bandwidths that the layer profiles state for the devices; what they do not state, and prices, are list figures.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from results import DATA

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.predictor.transformer import Transformer

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Published figures; prices in usd for an hour."""

    memory: int
    inside: float
    between: float
    usd: float
    watts: float
    per_node: int = 4


GPUS = {
    # As the layer profiles call them.
    "A100-40": Gpu(memory=40, inside=243.2e9, between=6.036e9, usd=3.67, watts=400),
    "V100-16": Gpu(memory=16, inside=68.2e9, between=5.787e9, usd=2.48, watts=300),
    "GH-96": Gpu(memory=96, inside=250.6e9, between=92.55e9, usd=5.0, watts=700),
    # As the catalog calls them.
    "A100-SXM-40GB": Gpu(memory=40, inside=243.2e9, between=6.036e9, usd=3.67, watts=400),
    "A100-SXM-80GB": Gpu(memory=80, inside=243.2e9, between=13.54e9, usd=5.03, watts=400),
    "GH200-96GB": Gpu(memory=96, inside=250.6e9, between=92.55e9, usd=5.0, watts=700),
    "H100-SXM-80GB": Gpu(memory=80, inside=450e9, between=50e9, usd=8.0, watts=700, per_node=8),
    "H200-SXM-141GB": Gpu(memory=141, inside=450e9, between=50e9, usd=9.0, watts=700, per_node=8),
    "L40S": Gpu(memory=48, inside=32e9, between=12.5e9, usd=2.0, watts=350, per_node=8),
    "B200": Gpu(memory=180, inside=900e9, between=100e9, usd=14.0, watts=1000, per_node=8),
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


LLAMA_3_8B = Transformer(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocab=128256, seq=8192, tied=False
)
LLAMA_3_70B = Transformer(
    layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, gated=True, vocab=128256, seq=8192, tied=False
)
MOE_1800B = Transformer(layers=120, hidden=12288, heads=96, ffn=36864, experts=16, topk=2, vocab=100352, seq=4096)
"""As large as GPT-4 is said to be."""


def with_profiles(description: str | None) -> argparse.Namespace:
    """The arguments of every benchmark, and ``--profiles FILE``."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a form of at most two minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as JSON")
    parser.add_argument(
        "--profiles",
        type=Path,
        metavar="FILE",
        default=DATA / "layer_profiles.json",
        help="measured layers",
    )
    options = parser.parse_args()
    if not options.profiles.exists():
        sys.exit(f"there is no file of layer profiles at {options.profiles}: name one with --profiles FILE")
    return options
