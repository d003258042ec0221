"""What the published rows leave out, filled in from what is public about their models, frameworks and clusters; each such fact once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from row_plan import Recompute, RowPlan

from heterodyne.cluster.catalog import Accelerator, lookup
from heterodyne.errors import ClusterError
from heterodyne.predictor.setup import Precision
from heterodyne.predictor.software import software_of
from heterodyne.predictor.transformer import Transformer

__all__ = ["device_of", "model_of", "network_of_row", "plan_of", "seconds_of"]

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
_PRECISIONS: Mapping[str, Precision] = {"fp8": "fp8", "tf32": "tf32", "fp16": "fp16"}
_SCHEDULES = {"ZB-2p": "ZBH2", "ZB-1p": "ZBH1", "1F1B-I": "Interleaved1F1B"}
_GATED = ("llama", "qwen", "internlm", "grok")
"""Models whose feed-forward layers have three matrices."""
_CUBE_MESH = tuple(links / 6 for links in (1, 1, 2, 4, 4, 4, 5, 6))
"""Of NVIDIA's DGX-1 and the V100 servers of AWS: a device has six links, one or two to each of its four neighbours; four of them end in
its half of the node (NVIDIA DGX-1 white paper, figure 4)."""
_OF_A_RACK = 64
"""Of the 72 devices of a GB200 NVL72 that NVLink joins, whatever trays of 4 they are on: jobs of 128 and more take blocks of 16 trays, so
that powers of two fit (NVIDIA, "Slurm block scheduling on GB200 NVL72")."""
_OMNI_PATH = 4 * 100e9 / 8
"""Of a node of Jean Zay, where BigScience trained: four Omni-Path links of 100 Gb/s."""


def device_of(row: Mapping[str, Any]) -> Accelerator | None:
    name = row["cluster"]["device"] or ""
    if name in _NOT_IN_THE_CATALOG:
        return _NOT_IN_THE_CATALOG[name]
    kind = next((kind for prefix, kind in _KINDS if name.startswith(prefix)), None)
    try:
        return None if kind is None else lookup(kind)
    except ClusterError:
        return None


def model_of(row: Mapping[str, Any]) -> Transformer | None:
    """None where nobody says how wide the feed-forward layer is."""
    shape, name = row["model"], (row["model"]["name"] or "").lower()
    hidden, seq = shape["hidden"], shape["seq"]
    vocab, ffn = shape.get("vocab") or 51200, shape.get("ffn") or shape.get("moe_ffn")
    gated = any(word in name for word in _GATED)
    experts, moe_every, tied = shape.get("experts") or 0, 1, not gated
    if "internlm-7b" in name:  # its configuration
        ffn, vocab = 11008, 103168
    if "gpt3_7b" in name:  # its model_config.yaml: nothing is said of the feed-forward layer, so Megatron's default
        ffn, vocab, tied = 4 * hidden, 131072, False
    if "grok" in name:  # xai-org/grok-1, run.py
        vocab = 128 * 1024
    if "nemotron-340b" in name:  # Nemotron-4 340B Technical Report, section 2.1: squared ReLU, input and output untied
        vocab, tied = 256000, False
    alpa = row["source"].startswith("Alpa")
    if alpa and experts:  # its benchmark_2d_one_case_moe.py: "specific to gspmd"; parameters come out as it states them
        ffn, moe_every = 8 * hidden, 2
    if not ffn:
        return None
    bert = "bert" in name
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
        experts=experts,
        topk=shape.get("topk") or 1,
        moe_every=moe_every,
        dense_dispatch=alpa and experts > 0,
        dropout="gpt3_7b" in name,  # Megatron's default
        causal=not bert,
        predicted=(20 / 128 if seq == 128 else 80 / 512)
        if bert
        else 1.0,  # the most masked tokens that its scripts predict
        tied=tied,
    )


def plan_of(row: Mapping[str, Any]) -> RowPlan:
    plan, shape = row["parallel"], row["model"]
    software = software_of(plan.get("framework"))
    if "fp32 grad" in (plan.get("precision") or ""):  # sums of gradients in 32 bits besides those in 16
        software = replace(software, gradient_bytes=6)
    if "fp32 all-reduce" in (plan.get("precision") or ""):
        software = replace(software, gradient_bytes=4)
    if row["source"].startswith("Alpa") and shape.get("experts"):  # its benchmark_2d_one_case_moe.py has Adafactor:
        # a master, moments that are a row and a column of each matrix; the gradient is read three times for them.
        software = replace(software, state_bytes=4, optimizer_bytes=16)
    if plan.get("zero1_group"):
        software = replace(software, state_group=max(0, plan["zero1_group"]))
    if "rowwise" in (plan.get("precision") or "").lower():
        software = replace(software, rowwise=True)
    if plan.get("async_tp"):
        software = replace(software, overlap_tensor=software_of("async tp").overlap_tensor)
    if "torchtitan" in str(plan.get("framework")) and not _compiled(plan):
        software = replace(software, fused=False)
    recompute, part = _recompute(str(plan.get("recompute")))
    pp, vpp = plan["pp"] or 1, plan.get("vpp") or 1
    schedule = _SCHEDULES.get(plan.get("schedule") or "", "1F1B")
    if schedule == "Interleaved1F1B" and vpp == 1:  # a layer a stage
        vpp = max(1, (shape["layers"] + 2) // pp)
    zero, beside = plan.get("zero"), plan.get("sequence_parallel")
    if zero is None and "fsdp" in str(plan.get("sharding")).lower():
        zero = 3
    if (
        zero == "fsdp2"
    ):  # torchtitan/models/llama3/parallelize.py: beside tensor parallelism, norms are on slices of the sequence
        zero, beside = 3, (plan["tp"] or 1) > 1
    return RowPlan(
        global_batch=plan["global_batch"],
        micro_batch=plan["micro_batch"],
        dp=plan["dp"] or 1,
        tp=plan["tp"] or 1,
        pp=pp,
        vpp=vpp,
        cp=plan.get("cp") or 1,
        ep=plan.get("ep") or 1,
        etp=_expert_width(row),
        zero=(1 if software.tuned else 0) if zero is None else zero,
        precision=_precision(plan.get("precision") or "bf16"),
        recompute=recompute,
        recompute_part=part,
        sequence_parallel=(software.tuned and (plan["tp"] or 1) > 1) if beside is None else beside,
        partition=_partition(plan.get("partition"), shape["layers"]),
        schedule=schedule,
        software=software,
    )


def _compiled(plan: Mapping[str, Any]) -> bool:
    """torchtitan runs an op a kernel where it does not compile; docs/float8.md asks for that where layers are in 8 bits."""
    said = "compile" in str(plan.get("framework")) or bool(plan.get("compile"))
    return said or _precision(plan.get("precision") or "") == "fp8"


def _expert_width(row: Mapping[str, Any]) -> int:
    """Of an expert, in neighbours: in Megatron Core as many as tensor parallelism has, unless it is told. Megatron-MoE-ModelZoo tells 1."""
    plan = row["parallel"]
    if not plan.get("ep") or row["source"].startswith("Megatron-MoE-ModelZoo"):
        return plan.get("etp") or 1
    return plan.get("etp") or plan["tp"] or 1


def _partition(bounds: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """Layers of each stage, from where DeepSpeed cuts its list: so many modules come before the layers as behind them."""
    if not bounds:
        return ()
    before = (bounds[-1] - layers) // 2
    inside = [min(max(bound - before, 0), layers) for bound in bounds]
    return tuple(high - low for low, high in pairwise(inside))


def _recompute(said: str) -> tuple[Recompute, float]:
    if said in ("full", "recompute-block"):
        return "full", 1.0
    if said.startswith("selective"):
        return "selective", 1.0
    # llm.q names parts of a layer; together they are a third of its forward.
    return ("full", 0.35) if said.startswith("recompute") else ("none", 1.0)


def _precision(said: str) -> Precision:
    said = said.lower()
    if said.startswith("fp32"):
        return "fp32"
    return next((precision for word, precision in _PRECISIONS.items() if word in said), "bf16")


def network_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    cluster = row["cluster"]
    found: dict[str, Any] = {"devices_per_node": cluster.get("gpus_per_node") or 8}
    if "NVL72" in (cluster.get("intra") or ""):
        found["devices_per_node"] = _OF_A_RACK
    if "p3.16xlarge" in (cluster.get("intra") or "") or "p3.24xlarge" in (cluster.get("intra") or ""):
        found["reached"] = _CUBE_MESH
    said = re.search(r"(?:(\d+)x)?\s*([\d.]+)\s*(GB/s|Gb/s|Gbps)", cluster.get("inter") or "")
    if said:
        scale = 1e9 if said[3] == "GB/s" else 1e9 / 8
        links = found["devices_per_node"] if "per GPU" in cluster["inter"] else int(said[1] or 1)
        found["between_bytes_per_s"] = links * float(said[2]) * scale
        found["rdma"] = "AWS" not in cluster["inter"]  # these instances have no network card that RDMA can use
    elif row["source"].startswith("BigScience"):
        found["between_bytes_per_s"] = _OMNI_PATH
    return found


def seconds_of(row: Mapping[str, Any], model: Transformer) -> float | None:
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
