"""Published training runs as the predictor takes them: shape, setup, device, network; and what was measured.

What a row does not say is filled in from what is public about its model or its framework; each such fact stands here, once. Sources are
split into two sides: the predictor's constants are fitted on one, and judged on the other. Each kind of plan is on both sides (large
models sharded or in three dimensions, small ones that launch kernels, encoders, experts), and no lab's tables are on both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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

__all__ = ["FIT", "TEST", "Run", "left_out", "refuted_bytes", "runs"]

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
_PRECISIONS: Mapping[str, Precision] = {"fp8": "fp8", "tf32": "tf32", "fp16": "fp16"}
_SCHEDULES = {"ZB-2p": "ZBH2", "ZB-1p": "ZBH1", "1F1B-I": "Interleaved1F1B"}
_ALLOCATED = ("Megatron-LM CI golden", "Alpa")
"""Sources that read their allocator (`mem-max-allocated-bytes`; XLA's `max_memory_allocated`). BigScience read `nvidia-smi` on the nodes
with the embedding; Zero Bubble does not say, and is taken as such."""
_NO_WORDS = {
    "gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed": "multi-latent attention, multi-token prediction",
}
"""Models whose configuration files have what a `Transformer` cannot say: their rows are of another model, and left out."""
_CUBE_MESH = tuple(links / 6 for links in (1, 1, 2, 4, 4, 4, 5, 6))
"""Of NVIDIA's DGX-1 and the V100 servers of AWS: a device has six links, one or two to each of its four neighbours; four of them end in
its half of the node (NVIDIA DGX-1 white paper, figure 4)."""
_OMNI_PATH = 4 * 100e9 / 8
"""Of a node of Jean Zay, where BigScience trained: four Omni-Path links of 100 Gb/s."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row.

    Args:
        measured_s: a step. ``measured_bytes``: of the fullest device, None if the source does not say or cannot have seen it.
        allocated: whether ``measured_bytes`` are what the framework's allocator has given out; else all that the device is short of.
    """

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
    allocated: bool = False

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
    return [run for row in _complete(path, quality) if _other(row) is None and (run := _run(row)) is not None]


def left_out(path: Path, *, quality: str = "A") -> Mapping[str, str]:
    """Ids of complete rows that tell of another run than the one that was measured, and why that is known."""
    return {row["id"]: why for row in _complete(path, quality) if (why := _other(row)) is not None}


def _complete(path: Path, quality: str) -> list[Mapping[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [row for row in rows if row["quality"] == quality and row["completeness"].startswith("full")]


def _other(row: Mapping[str, Any]) -> str | None:
    plan, devices = row["parallel"], row["cluster"]["gpus"]
    if row["model"]["name"] in _NO_WORDS:
        return f"its model has {_NO_WORDS[row['model']['name']]}"
    asked = math.prod(plan.get(degree) or 1 for degree in ("dp", "tp", "pp", "cp"))
    return f"a plan for {asked} devices on {devices}" if plan.get("dp") and asked != devices else None


def refuted_bytes(found: Iterable[Run]) -> set[str]:
    """Ids of rows whose bytes cannot be of the fullest device of the plan that is stated.

    All that a plan holds grows with its micro-batches or stays. Of two rows alike in all but those, the one with the larger must not have
    less; where it has, one of the two is not as it is described. Which, they do not say: neither counts.
    """
    alike: dict[tuple[object, ...], list[Run]] = {}
    for run in found:
        if run.measured_bytes is not None:
            setup = replace(run.setup, micro_batch=1)
            alike.setdefault((run.source, run.model, run.device.kind, run.devices, setup), []).append(run)
    return {
        run.id
        for rows in alike.values()
        for small in rows
        for large in rows
        if small.setup.micro_batch < large.setup.micro_batch
        and (small.measured_bytes or 0.0) > (large.measured_bytes or 0.0)
        for run in (small, large)
    }


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
        allocated=row["source"].startswith(_ALLOCATED),
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
    experts, moe_every, tied = shape.get("experts") or 0, 1, not gated
    if "internlm-7b" in name:  # its configuration
        ffn, vocab = 11008, 103168
    if "gpt3_7b" in name:  # its model_config.yaml: nothing is said of the feed-forward layer, so Megatron's default
        ffn, vocab, tied = 4 * hidden, 131072, False
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


def _setup(row: Mapping[str, Any]) -> Setup:
    plan, shape = row["parallel"], row["model"]
    software = software_of(plan.get("framework"))
    if "fp32 grad" in (plan.get("precision") or ""):  # sums of gradients in 32 bits besides those in 16
        software = replace(software, gradient_bytes=6)
    if "fp32 all-reduce" in (plan.get("precision") or ""):
        software = replace(software, gradient_bytes=4)
    if row["source"].startswith("Alpa") and shape.get("experts"):  # its benchmark_2d_one_case_moe.py has Adafactor:
        # a master, moments that are a row and a column of each matrix; the gradient is read three times for them.
        software = replace(software, state_bytes=4, optimizer_bytes=16)
    recompute, layers = _recompute(str(plan.get("recompute")))
    pp, vpp = plan["pp"] or 1, plan.get("vpp") or 1
    schedule = _SCHEDULES.get(plan.get("schedule") or "", "1F1B")
    if schedule == "Interleaved1F1B" and vpp == 1:  # a layer a stage
        vpp = max(1, (shape["layers"] + 2) // pp)
    zero, beside = plan.get("zero"), plan.get("sequence_parallel")
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
        sequence_parallel=(software.tuned and (plan["tp"] or 1) > 1) if beside is None else beside,
        partition=_partition(plan.get("partition"), shape["layers"]),
        schedule=schedule,
        software=software,
    )


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


def _network(row: Mapping[str, Any]) -> dict[str, Any]:
    cluster = row["cluster"]
    found: dict[str, Any] = {"devices_per_node": cluster.get("gpus_per_node") or 8}
    if "p3.16xlarge" in (cluster.get("intra") or "") or "p3.24xlarge" in (cluster.get("intra") or ""):
        found["reached"] = _CUBE_MESH
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
