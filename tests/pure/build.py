"""Small models, clusters and profiles, made by hand: what the pure tests reason about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from heterodyne.cluster import BlockSample, Cluster, Device, DeviceProfile, Link, LinkSample, Profile
from heterodyne.graph import Block, Loss, ModelGraph, Op, Parameter, Size, TensorSpec

MIB = 2**20
ROOMY = 64 * 2**30


def graph(
    layers: int = 4,
    *,
    width: int = 8,
    places: tuple[int, ...] = (),
    batch_statistics: bool = False,
    dtype: str = "float32",
    saved: int = 1000,
) -> ModelGraph:
    """An embedding, ``layers`` alike blocks of two ops, a head tied to nothing; one parameter an op. ``places``: behind channels."""
    names = ["embed", *(f"layer{i}.{part}" for i in range(layers) for part in ("up", "down")), "head"]
    blocks = [("embed", 0, 1), *((f"layer{i}", 1 + 2 * i, 3 + 2 * i) for i in range(layers))]
    blocks.append(("head", 1 + 2 * layers, 2 + 2 * layers))
    out = TensorSpec(shape=(Size.per_sample(1), Size.of(width), *map(Size.of, places)), dtype="float32")
    ops = tuple(
        Op(
            name=name,
            target="aten.linear.default",
            inputs=(names[number - 1],) if number else ("x",),
            parameters=(f"{name}.weight",),
            outputs=(out,),
            differentiable=(True,),
            module=name,
            source="model.py:1",
            flops_forward=Size.per_sample(2 * width * width),
            flops_backward=Size.per_sample(4 * width * width),
            bytes_read=Size.per_sample(4 * width),
            bytes_written=Size.per_sample(4 * width),
            bytes_saved=Size.per_sample(saved),
        )
        for number, name in enumerate(names)
    )
    return ModelGraph(
        name="Chain",
        inputs=(),
        parameters=tuple(
            Parameter(name=f"{name}.weight", shape=(width, width), dtype=dtype, trainable=True) for name in names
        ),
        buffers=(),
        ops=ops,
        blocks=tuple(
            Block(index=i, name=name, kind="layer" if name.startswith("layer") else name, start=a, stop=b)
            for i, (name, a, b) in enumerate(blocks)
        ),
        loss=Loss(reduction="mean"),
        batch_statistics=("layer0.up",) if batch_statistics else (),
    )


def cluster(
    devices: int, *, memory: int | Sequence[int] = ROOMY, nodes: int = 1, link: Link | None = None, named: str = "cpu"
) -> Cluster:
    """``devices`` devices, dealt out over nodes in turn, and joined by links that cost nothing (or by ``link``)."""
    sizes = [memory] * devices if isinstance(memory, int) else list(memory)
    nodes = min(nodes, devices)
    ends = [f"n{i}" for i in range(nodes)]
    joined = [
        link or Link(between=(a, b), bandwidth_bytes_per_s=1e30, latency_s=0.0)
        for number, a in enumerate(ends)
        for b in ends[number:]
    ]
    return Cluster(
        name="made",
        devices=tuple(
            Device(id=f"n{i % nodes}/{named}:{i}", kind=named, node=f"n{i % nodes}", memory_bytes=sizes[i])
            for i in range(devices)
        ),
        links=tuple(joined),
    )


def linear(seconds_per_sample: float, fixed_s: float = 0.0) -> Callable[[int], float]:
    """Seconds of a block's forward and backward together: affine in the micro-batch size."""
    return lambda size: fixed_s + seconds_per_sample * size


def device_profile(
    model: ModelGraph,
    seconds: Callable[[int], float],
    *,
    sizes: Sequence[int] = (1, 2, 4, 8),
    optimizer_s: float = 0.0,
    overhead_s: float = 0.0,
    overlap: float = 0.0,
    saved: int = 0,
) -> DeviceProfile:
    """``seconds`` is of the whole model; each block takes an equal part, a third of it forward."""
    part = 1 / len(model.blocks)
    samples = tuple(
        BlockSample(
            micro_batch_size=size,
            forward_s=seconds(size) * part / 3,
            backward_s=seconds(size) * part * 2 / 3,
            spread=0.0,
            saved_bytes=saved * size,
        )
        for size in sizes
    )
    return DeviceProfile(
        blocks=dict.fromkeys(model.kinds, samples),
        optimizer_s_per_byte=optimizer_s / max(1, model.trainable_bytes),
        step_overhead_s=overhead_s,
        overlap=overlap,
    )


def profile(
    model: ModelGraph,
    machines: Cluster,
    seconds: Sequence[Callable[[int], float]],
    *,
    reduce: Callable[[int], float] | None = None,
    **options: float,
) -> Profile:
    """A profile of every device; ``reduce``: seconds of an all-reduce of all devices by bytes, if it was measured."""
    ids = tuple(d.id for d in machines.devices)
    links: tuple[LinkSample, ...] = ()
    if reduce is not None and len(ids) > 1:
        links = tuple(
            LinkSample(op="all_reduce", devices=ids, bytes=size, seconds=reduce(size), spread=0.0)
            for size in (1000, 10_000, 100_000, 1_000_000)
        )
    devices: Mapping[str, DeviceProfile] = {
        name: device_profile(model, curve, **options)  # type: ignore[arg-type]
        for name, curve in zip(ids, seconds, strict=True)
    }
    return Profile(key="test", devices=devices, links=links)
