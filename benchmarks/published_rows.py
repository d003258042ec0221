"""Published training runs as the predictor takes them: shape, setup, device, network; and what was measured.

What a row does not say is filled in from what is public about its model or its framework; each such fact stands here, once. Sources are
split into two sides: the predictor's constants are fitted on one, and judged on the other. Each kind of plan is on both sides (large
models sharded or in three dimensions, small ones that launch kernels, encoders, experts), and no lab's tables are on both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from heterodyne.cluster.catalog import Accelerator, lookup
from heterodyne.errors import ClusterError
from heterodyne.predictor.constants import Constants
from heterodyne.predictor.devices import network_of
from heterodyne.predictor.network import Network
from heterodyne.predictor.setup import Precision, Recompute, Setup
from heterodyne.predictor.software import software_of
from heterodyne.predictor.transformer import Transformer

__all__ = ["FIT", "TEST", "Run", "runs"]

Side = Literal["fit", "test"]
FIT: Side = "fit"
TEST: Side = "test"

SIDES: tuple[tuple[str, Side], ...] = (
    ("MosaicML", FIT),
    ("BigScience", FIT),
    ("vTrain", FIT),
    ("NVIDIA DeepLearningExamples BERT-Large (TensorFlow 2)", FIT),
    ("Alpa", FIT),
    ("Megatron-LM README 2020", FIT),
    ("Megatron-LM CI golden", FIT),
    ("InternEvo", TEST),
    ("Zero Bubble", TEST),
    ("AMP", TEST),
    ("NVIDIA DeepLearningExamples BERT-Large (PyTorch)", TEST),
    ("llm.q", TEST),
    ("Narayanan", TEST),
    ("Megatron-MoE", TEST),
    ("DeepSpeed SDMA", TEST),
)

_KINDS = (
    ("A100-SXM-40GB", "A100-SXM-40GB"),
    ("A100-SXM", "A100-SXM-80GB"),
    ("V100-SXM2-16GB", "V100-SXM2-16GB"),
    ("V100-SXM", "V100-SXM2-32GB"),
    ("H100", "H100-SXM-80GB"),
    ("T4", "T4"),
    ("RTX-4090", "RTX-4090"),
    ("MI300X", "MI300X"),
    ("GB200", "GB200"),
)
_NOT_IN_THE_CATALOG = {
    # The maker's product page; dense, with sums in 32 bits.
    "RTX-5060Ti-16GB": Accelerator(
        kind="RTX-5060Ti-16GB", backend="cuda", aliases=(), peak_flops={"fp32": 23.7e12, "fp16": 47.4e12, "bf16": 47.4e12, "fp8": 94.8e12},
        measured_flops={}, memory_bytes=16 * 10**9, memory_bandwidth_bytes_per_s=448e9, link_bandwidth_bytes_per_s=None,
        link_type="PCIe 5 x8", tdp_w=180, prices=(), sources=("nvidia.com",), notes="",
    )
}  # fmt: skip
_SCHEDULES = {"ZB-2p": "ZBH2", "ZB-1p": "ZBH1", "1F1B-I": "Interleaved1F1B"}
_OMNI_PATH = 4 * 100e9 / 8
"""Of a node of Jean Zay, where BigScience trained: four Omni-Path links of 100 Gb/s."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row. ``measured_s`` a step; ``measured_bytes`` of the fullest device, None if the source does not say."""

    id: str
    source: str
    side: Side
    device: Accelerator
    devices: int
    model_name: str
    model: Transformer
    setup: Setup
    network: Mapping[str, Any]
    measured_s: float
    measured_bytes: float | None

    @property
    def group(self) -> str:
        """Rows that share what a calibration can learn."""
        return f"{self.source} / {self.device.kind}"

    @property
    def flops_per_s(self) -> float:
        """Of the model, without what is computed again, a device."""
        tokens = self.model.seq * self.setup.global_batch
        return 3 * self.model.forward_flops_a_token() * tokens / self.devices / self.measured_s

    def wires(self, known: Constants | None = None) -> Network:
        return network_of(self.device, known=known, **self.network)


def runs(path: Path, *, quality: str = "A") -> list[Run]:
    """All usable rows of that quality whose plan and rate are complete, in the order of the file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    wanted = (row for row in rows if row["quality"] == quality and row["completeness"].startswith("full"))
    return [run for row in wanted if (run := _run(row)) is not None]


def _run(row: Mapping[str, Any]) -> Run | None:
    side = next((side for name, side in SIDES if row["source"].startswith(name)), None)
    device = _device(row["cluster"]["device"] or "")
    shape, plan = row["model"], row["parallel"]
    known = all(shape.get(key) for key in ("layers", "hidden", "heads", "seq"))
    if side is None or device is None or not known or not plan.get("global_batch") or not plan.get("micro_batch"):
        return None
    model = _model(row)
    if model is None:
        return None
    seconds = _seconds(row, model)
    if seconds is None:
        return None
    peak = row["measured"].get("peak_mem_gb")
    gib = row["measured"].get("peak_mem_gib")
    return Run(
        id=row["id"],
        source=row["source"],
        side=side,
        device=device,
        devices=row["cluster"]["gpus"],
        model_name=shape["name"],
        model=model,
        setup=_setup(row),
        network=_network(row),
        measured_s=seconds,
        measured_bytes=peak * 1e9 if peak else gib * 2**30 if gib else None,
    )


def _device(name: str) -> Accelerator | None:
    if name in _NOT_IN_THE_CATALOG:
        return _NOT_IN_THE_CATALOG[name]
    kind = next((kind for prefix, kind in _KINDS if name.startswith(prefix)), None)
    try:
        return None if kind is None else lookup(kind)
    except ClusterError:
        return None


def _model(row: Mapping[str, Any]) -> Transformer | None:
    """None where nobody says how wide the feed-forward layer is."""
    shape, name = row["model"], (row["model"]["name"] or "").lower()
    hidden, seq = shape["hidden"], shape["seq"]
    vocab, ffn = shape.get("vocab") or 51200, shape.get("ffn") or shape.get("moe_ffn")
    gated = any(word in name for word in ("llama", "qwen", "internlm"))
    if "internlm-7b" in name:  # its configuration
        ffn, vocab = 11008, 103168
    if "gpt3_7b" in name:  # 7 billion parameters with 8 kv heads: Llama-3's feed-forward layer
        ffn, gated = 14336, True
    if not ffn:
        return None
    bert, gshard = "bert" in name, "gshard" in name
    if bert:
        vocab = 30522
    return Transformer(
        layers=shape["layers"],
        hidden=hidden,
        heads=shape["heads"],
        kv_heads=shape.get("kv_heads"),
        head_dim=128 if "qwen3" in name else None,
        vocab=vocab,
        seq=seq,
        ffn=ffn,
        gated=gated,
        experts=shape.get("experts") or 0,
        topk=shape.get("topk") or 1,
        moe_every=2 if gshard else 1,  # GShard: every other layer, places for twice the tokens, one-hot products
        capacity=2.0 if gshard else 1.0,
        dense_dispatch=gshard,
        causal=not bert,
        predicted=(20 / 128 if seq == 128 else 80 / 512)
        if bert
        else 1.0,  # the most masked tokens that its scripts predict
        tied=not gated,
    )


def _setup(row: Mapping[str, Any]) -> Setup:
    plan, shape = row["parallel"], row["model"]
    software = software_of(plan.get("framework"))
    if "fp32 grad" in (plan.get("precision") or ""):  # sums of gradients in 32 bits besides those in 16
        software = replace(software, gradient_bytes=6)
    if "fp32 all-reduce" in (plan.get("precision") or ""):
        software = replace(software, gradient_bytes=4)
    recompute, layers = _recompute(str(plan.get("recompute")))
    pp, vpp = plan["pp"] or 1, plan.get("vpp") or 1
    schedule = _SCHEDULES.get(plan.get("schedule") or "", "1F1B")
    if schedule == "Interleaved1F1B" and vpp == 1:  # a layer a stage
        vpp = max(1, (shape["layers"] + 2) // pp)
    zero = plan.get("zero")
    return Setup(
        global_batch=plan["global_batch"],
        micro_batch=plan["micro_batch"],
        dp=plan["dp"] or 1,
        tp=plan["tp"] or 1,
        pp=pp,
        vpp=vpp,
        cp=plan.get("cp") or 1,
        ep=plan.get("ep") or 1,
        zero=(1 if software.tuned else 0) if zero is None else zero,
        precision=_precision(plan.get("precision") or "bf16"),
        recompute=recompute,
        recompute_layers=layers,
        sequence_parallel=bool(plan.get("sequence_parallel")) or (software.tuned and (plan["tp"] or 1) > 1),
        schedule=schedule,
        software=software,
    )


def _recompute(said: str) -> tuple[Recompute, float]:
    if said in ("full", "recompute-block"):
        return "full", 1.0
    if said.startswith("selective"):
        return "selective", 1.0
    # llm.q names parts of a layer; together they are a third of its forward.
    return ("full", 0.35) if said.startswith("recompute") else ("none", 1.0)


def _precision(said: str) -> Precision:
    said = said.lower()
    for word in ("fp8", "tf32"):
        if word in said:
            return word  # type: ignore[return-value]
    return "fp32" if said.startswith("fp32") else "fp16" if "fp16" in said else "bf16"


def _network(row: Mapping[str, Any]) -> dict[str, Any]:
    cluster = row["cluster"]
    found: dict[str, Any] = {"devices_per_node": cluster.get("gpus_per_node") or 8}
    said = re.search(r"(?:(\d+)x)?\s*([\d.]+)\s*(GB/s|Gb/s|Gbps)", cluster.get("inter") or "")
    if said:
        scale = 1e9 if said[3] == "GB/s" else 1e9 / 8
        found["between_bytes_per_s"] = int(said[1] or 1) * float(said[2]) * scale
        found["rdma"] = "AWS" not in cluster["inter"]  # these instances have no network card that RDMA can use
    elif row["source"].startswith("BigScience"):
        found["between_bytes_per_s"] = _OMNI_PATH
    return found


def _seconds(row: Mapping[str, Any], model: Transformer) -> float | None:
    derived, measured = row.get("derived") or {}, row["measured"]
    seconds = derived.get("iter_s") or measured.get("iter_s")
    if seconds or not measured.get("tflops_per_gpu") or "recompute" not in (measured.get("flops_kind") or ""):
        return seconds
    # Narayanan et al. (2021), formula 3, which counts the recomputed forward.
    s, h, layers = model.seq, model.hidden, model.layers
    flops = (
        96 * row["parallel"]["global_batch"] * s * layers * h**2 * (1 + s / (6 * h) + model.vocab / (16 * layers * h))
    )
    return flops / (row["cluster"]["gpus"] * measured["tflops_per_gpu"] * 1e12)
