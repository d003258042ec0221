"""From a kind of device to what the roofline needs: datasheet times generation times constants."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import Field

from heterodyne.cluster.catalog import Accelerator
from heterodyne.cluster.fleet import Fleet
from heterodyne.documents import Section, read_yaml, validate
from heterodyne.errors import ClusterError
from heterodyne.predictor.constants import Constants, constants
from heterodyne.predictor.network import Network
from heterodyne.predictor.roofline import Chip
from heterodyne.predictor.setup import Precision
from heterodyne.predictor.software import Software

__all__ = ["chip_of", "generation_of", "network_of", "networks_of", "reached_between"]


class _Generation(Section):
    kinds: tuple[str, ...]
    units: int = Field(gt=0)
    best: float = Field(gt=0, le=1.2)
    memory: float | None = Field(None, gt=0, le=1)
    flash2: tuple[float, float]
    cudnn: tuple[float, float] | None = None
    writes_behind: bool = False
    nic_gb_per_s: float = Field(gt=0)
    source: str


class _Generations(Section):
    entries: tuple[_Generation, ...]


@cache
def _generations() -> tuple[_Generation, ...]:
    path = Path(str(files("heterodyne.predictor") / "generations.yaml"))
    content, lines = read_yaml(path, ClusterError)
    return validate(_Generations, {"entries": content}, error=ClusterError, path=str(path), lines=lines).entries


def generation_of(kind: str) -> _Generation:
    """What devices of this kind have in common with others."""
    return next(g for g in _generations() if any(kind.startswith(prefix) for prefix in g.kinds))


def chip_of(device: Accelerator, precision: Precision, software: Software, known: Constants | None = None) -> Chip:
    """What a device does at a precision under some software.

    Raises ClusterError, with what is missing, for a device whose datasheet lacks a peak or the bandwidth of its memory.
    """
    if precision == "bf16" and not software.fp16:
        device = _without_fp16(device)
    known = known or constants()
    fitted, stated = known.fitted, known.stated
    generation = generation_of(device.kind)
    if device.memory_bandwidth_bytes_per_s is None:
        raise ClusterError(
            f"the memory bandwidth of {device.kind} is not known: give it under 'kinds' in the cluster file"
        )
    wanted: Precision = "bf16" if precision == "fp8" and "fp8" not in device.peak_flops else precision
    of_products = _best_flops(device, generation.best, wanted, known)
    training = fitted.training_hopper if generation.writes_behind else fitted.training
    rate = 1.0 if wanted == "fp32" else min(1.0, training * (stated.tuned if software.tuned else 1.0))
    sixteen = max(device.peak_flops.get("bf16", 0.0), device.peak_flops.get("fp16", 0.0)) or of_products
    narrow, wide = _attention_parts(generation, software, known)
    most = min(sixteen, 2.5 * of_products)
    cast = wanted == "fp8"
    scaled = stated.fp8_rowwise if cast and software.rowwise else 1.0
    return Chip(
        flops=of_products * rate * scaled,
        wide_flops=(_best_flops(device, generation.best, "bf16", known) if cast else of_products) * rate,
        units=generation.units,
        memory_bytes_per_s=device.memory_bandwidth_bytes_per_s * (generation.memory or stated.memory),
        attention=(narrow * most, wide * most),
        launch_s=fitted.launch_us * 1e-6,
        element_bytes=4 if precision in ("fp32", "tf32") else 2,
        prologue=fitted.prologue,
        written=0.0 if generation.writes_behind else fitted.written,
        cast_bytes=stated.fp8_cast_bytes if cast else 0.0,
    )


def _attention_parts(generation: _Generation, software: Software, known: Constants) -> tuple[float, float]:
    """Of the peak in 16 bits, what the software's flash kernel does for heads of 64 and of 128."""
    if software.attention == "cudnn" and generation.cudnn is not None:
        return generation.cudnn
    part = known.fitted.flash1 if software.attention == "flash1" else 1.0
    narrow, wide = generation.flash2
    return part * narrow, part * wide


def _without_fp16(device: Accelerator) -> Accelerator:
    """What is left of it for a program that computes in bf16 only."""
    peaks, measured = (
        {p: f for p, f in own.items() if p != "fp16"} for own in (device.peak_flops, device.measured_flops)
    )
    return replace(device, peak_flops=peaks, measured_flops=measured)


def _best_flops(device: Accelerator, part: float, precision: Precision, known: Constants) -> float:
    """FLOP/s of the best large product at a precision; where a device has no units for it, of the next wider one."""
    peaks, measured = device.peak_flops, device.measured_flops
    if precision == "fp8":
        return measured.get("fp8") or _best_flops(device, part, "bf16", known) * known.stated.fp8
    if precision in ("bf16", "fp16"):
        either = [measured[p] for p in ("bf16", "fp16") if p in measured]
        if either:
            return max(either)
        peak = max(peaks.get("bf16", 0.0), peaks.get("fp16", 0.0))
        if peak:
            return peak * part
    if precision == "tf32" and "tf32" in peaks:
        return peaks["tf32"] * part
    if "fp32" in peaks:
        return peaks["fp32"] * known.stated.vector
    raise ClusterError(
        f"the peak of {device.kind} in {precision} is not known: give it under 'kinds' in the cluster file"
    )


def network_of(
    device: Accelerator,
    devices_per_node: int,
    *,
    inside_bytes_per_s: float | None = None,
    between_bytes_per_s: float | None = None,
    rdma: bool = True,
    reached: tuple[float, ...] = (),
    known: Constants | None = None,
) -> Network:
    """Nodes of such devices. What is not told is as on the datasheet, and as in the maker's reference server.

    Args:
        inside_bytes_per_s: of a device's link, as promised. ``between_bytes_per_s``: of all network cards of a node, as promised.
        reached: what part of its links a device has towards so many of its node, as `Network` has it.
        rdma: whether they write into the memory of devices by themselves; else the kernel carries everything through sockets.

    Raises ClusterError for devices of a node whose link is known to be another than PCIe, with a bandwidth that nobody states.
    """
    known = known or constants()
    stated, fitted = known.stated, known.fitted
    link = inside_bytes_per_s or device.link_bandwidth_bytes_per_s
    if link is None:
        if devices_per_node > 1 and device.link_type is not None and "PCIe" not in device.link_type:
            raise ClusterError(
                f"nobody states the bandwidth of {device.link_type} between the {device.kind} of a node: "
                "give 'link_bandwidth' under 'kinds' in the cluster file"
            )
        link = stated.pcie_gb_per_s * 1e9
    cards = between_bytes_per_s or generation_of(device.kind).nic_gb_per_s * 1e9 * devices_per_node
    between, latency_s = reached_between(cards, rdma=rdma, known=known)
    return Network(
        devices=devices_per_node,
        inside_bytes_per_s=link * (stated.inside if link >= stated.nvlink_gb_per_s * 1e9 else stated.pcie),
        between_bytes_per_s=between,
        inside_latency_s=fitted.inside_latency_us * 1e-6,
        between_latency_s=latency_s,
        reached=reached,
    )


def reached_between(
    promised_bytes_per_s: float, latency_s: float = 0.0, *, rdma: bool = True, known: Constants | None = None
) -> tuple[float, float]:
    """What collectives reach of a link between nodes: bytes/s, and the latency in s, of which the software has a part by itself."""
    known = known or constants()
    part = known.fitted.between if rdma else known.stated.sockets
    return promised_bytes_per_s * part, max(latency_s, known.fitted.between_latency_us * 1e-6)


def networks_of(fleet: Fleet) -> dict[str, Network]:
    """Of each kind. A kind whose pools differ is as in the first of them; its nodes are joined as in the pool whose nodes are joined
    worst.
    """
    found: dict[str, Network] = {}
    for pool in fleet.pools:
        if pool.kind in found:
            continue
        wires = [wire for own in fleet.pools if own.kind == pool.kind and (wire := fleet.wire(own, own)) is not None]
        made = network_of(
            fleet.accelerator(pool.kind),
            pool.devices_per_node,
            inside_bytes_per_s=None if pool.inside is None else pool.inside.bandwidth_bytes_per_s,
            between_bytes_per_s=min((wire.bandwidth_bytes_per_s for wire in wires), default=None),
        )
        waits = max((wire.latency_s for wire in wires), default=0.0)
        found[pool.kind] = replace(made, between_latency_s=max(made.between_latency_s, waits))
    return found
