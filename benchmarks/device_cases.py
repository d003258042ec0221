"""Devices one by one, and models that are captured for them: what the search over devices is judged with (`planner_golden`).

GPUs have the profiles that their datasheets give; CPUs such as emulated workers show, whose seconds are operations over a speed. Few and
more devices, links from fast to slow, memory from plenty to scarce, unlike devices in one node, blocks that are alike and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cluster.profile import BlockSample, DeviceProfile, Profile
from heterodyne.cluster.spec import Cluster, Device, Link
from heterodyne.cost.recipe import Recipe
from heterodyne.frontend.trace import trace
from heterodyne.graph import ModelGraph
from heterodyne.plan.precision import Precision
from heterodyne.predictor.datasheet_profile import believed_cluster, datasheet_profile
from heterodyne.predictor.usable import context_bytes
from heterodyne.search.planned import Planned
from heterodyne.search.planner import plan

__all__ = ["CPU_FLOPS_PER_S", "DeviceCase", "cpu_profile", "cpus", "device_cases"]

GB, MIB = 10**9, 2**20
CPU_FLOPS_PER_S = 50e9
"""Of a whole core of those that emulated workers share."""
_CALL_S = 2e-4
"""Of a block's forward on a whole core, whatever its size."""
_FAST, _SLOW = (
    Wire(bandwidth_bytes_per_s=12.5 * GB, latency_s=1e-5),
    Wire(bandwidth_bytes_per_s=0.5 * GB, latency_s=5e-5),
)
_PCIE = Wire(bandwidth_bytes_per_s=25 * GB, latency_s=1e-5)
_SPEEDS = (0.7, 0.35, 0.35, 0.2)


@dataclass(frozen=True, kw_only=True)
class DeviceCase:
    """What is planned. ``sizes``: of micro-batches. ``quick``: also in the quick form."""

    name: str
    graph: Callable[[], ModelGraph]
    cluster: Cluster
    profile: Callable[[ModelGraph], Profile]
    samples: int
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    precision: Precision = "fp32"
    quick: bool = False

    def prepare(self) -> None:
        """Capture the model and write its profile, which is no part of the search."""
        _ = self._profile

    def plan(self) -> Planned:
        """The best plan by prediction."""
        return plan(
            self.graph(),
            self.cluster,
            self._profile,
            global_batch_size=self.samples,
            micro_batch_sizes=self.sizes,
            precision=self.precision,
            bucket_bytes=None,
        )

    @cached_property
    def _profile(self) -> Profile:
        return self.profile(self.graph())


def device_cases() -> Iterator[DeviceCase]:
    """Every case, in a fixed order."""
    unlike = ("A100-SXM-40GB", "L40S", "A10", "L4")
    apart = [(kind,) for kind in unlike]
    yield _gpus("4 unlike GPUs in one node", [unlike], _SLOW, quick=True)
    yield _gpus("4 unlike GPUs apart, slow links", apart, _SLOW, quick=True)
    yield _gpus("4 unlike GPUs apart, slow links, scarce memory", apart, _SLOW, gb=2.5, quick=True)
    yield _gpus("8 GPUs of 2 kinds, fast links", [("A100-SXM-40GB",) * 4, ("L4",) * 4], _FAST)
    pairs = [("A10", "L4")] * 2 + [("L40S", "L4")] * 2
    yield _gpus("8 GPUs, unlike pairs in nodes, slow links", pairs, _SLOW)
    yield _gpus("8 GPUs, unlike pairs in nodes, slow links, scarce memory", pairs, _SLOW, gb=2)
    yield _gpus("16 GPUs of 2 kinds, fast links", [("A100-SXM-40GB",) * 8, ("L40S",) * 8], _FAST)
    nodes = [(kind,) * 4 for kind in unlike]
    yield _gpus("16 GPUs of 4 kinds, slow links", nodes, _SLOW)
    yield _gpus("16 GPUs of 4 kinds, fast links, scarce memory", nodes, _FAST, gb=2)
    slow, fast = Wire(bandwidth_bytes_per_s=25e6, latency_s=2e-4), Wire(bandwidth_bytes_per_s=1e9, latency_s=5e-5)
    yield _cpus("4 CPUs, slow links", small_gpt, _SPEEDS, slow, quick=True)
    yield _cpus("4 CPUs, scarce memory", small_gpt, _SPEEDS, fast, part=0.45, quick=True)
    yield _cpus("8 CPUs of 8 speeds, slow links", small_gpt, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2), slow)
    yield _cpus("4 CPUs, unlike blocks, slow links", pyramid, _SPEEDS, slow, quick=True)
    yield _cpus("4 CPUs, statistics of the batch, scarce memory", with_statistics, _SPEEDS, fast, part=0.3, quick=True)


def _gpus(
    name: str, nodes: Sequence[Sequence[str]], between: Wire, *, gb: float | None = None, quick: bool = False
) -> DeviceCase:
    """Nodes with these GPUs, for a GPT-2 medium in bf16. ``gb``: of memory for each beside the framework; None: all that it has."""
    memory = {"A100-SXM-40GB": 40, "L40S": 48, "A10": 24, "L4": 24}
    pools = tuple(
        Pool(
            name=f"n{number}.{kind}",
            kind=kind,
            nodes=1,
            devices_per_node=list(kinds).count(kind),
            memory_bytes=int(memory[kind] * GB if gb is None else gb * GB + context_bytes("cuda")),
            inside=_PCIE,
            between=between,
            node=f"n{number}",
        )
        for number, kinds in enumerate(nodes)
        for kind in dict.fromkeys(kinds)
    )
    fleet = Fleet(name=name, pools=pools, links={("all", "all"): between})

    def profile(graph: ModelGraph) -> Profile:
        return datasheet_profile(graph, fleet, sizes=(1, 2, 4, 8), recipe=Recipe(precision="bf16"))

    return DeviceCase(
        name=name,
        graph=medium_gpt,
        cluster=believed_cluster(fleet),
        profile=profile,
        samples=64,
        precision="bf16",
        quick=quick,
    )


def _cpus(
    name: str,
    graph: Callable[[], ModelGraph],
    speeds: Sequence[float],
    wire: Wire,
    *,
    part: float | None = None,
    quick: bool = False,
) -> DeviceCase:
    """``part``: of the whole model, with a micro-batch of one sample, that a device has memory for; None: any."""
    model = graph()
    held = 4 * sum(parameter.bytes for parameter in model.parameters) + sum(op.bytes_saved(1) for op in model.ops)
    memory = 64 * 2**30 if part is None else int(part * held) + 528 * MIB  # that the framework takes
    return DeviceCase(
        name=name,
        graph=graph,
        cluster=cpus(len(speeds), wire, [memory] * len(speeds)),
        profile=lambda graph: cpu_profile(graph, speeds),
        samples=16,
        quick=quick,
    )


def cpus(count: int, wire: Wire, memory: Sequence[int]) -> Cluster:
    """Nodes of a CPU each."""
    names = [f"n{number}" for number in range(count)]
    return Cluster(
        name="CPUs",
        devices=tuple(
            Device(id=f"{node}/cpu:0", kind="cpu", node=node, memory_bytes=own, backend="cpu")
            for node, own in zip(names, memory, strict=True)
        ),
        links=tuple(
            Link(between=(a, b), bandwidth_bytes_per_s=wire.bandwidth_bytes_per_s, latency_s=wire.latency_s)
            for number, a in enumerate(names)
            for b in names[number + 1 :]
        ),
    )


def cpu_profile(graph: ModelGraph, speeds: Sequence[float], sizes: Sequence[int] = (1, 2, 4, 8)) -> Profile:
    """Of devices that are as fast as a part of a core each."""

    def of_speed(speed: float) -> DeviceProfile:
        blocks = {}
        for kind, block in graph.kinds.items():
            ops = graph.ops_of(block)
            samples = []
            for size in sizes:
                forward, backward = (
                    sum(own(size) for own in flops) / CPU_FLOPS_PER_S
                    for flops in ([op.flops_forward for op in ops], [op.flops_backward for op in ops])
                )
                forward_s, backward_s = (forward + _CALL_S) / speed, (backward + 2 * _CALL_S) / speed
                saved = int(sum(op.bytes_saved(size) for op in ops))
                samples.append(
                    BlockSample(
                        micro_batch_size=size,
                        forward_s=forward_s,
                        backward_s=backward_s,
                        spread=0.0,
                        saved_bytes=saved,
                        input_s=backward_s / 2,
                        weight_s=backward_s / 2,
                        halved_forward_s=forward_s,
                    )
                )
            blocks[kind] = tuple(samples)
        return DeviceProfile(blocks=blocks, optimizer_s_per_byte=1e-9 / speed, step_overhead_s=1e-3)

    devices = {f"n{number}/cpu:0": of_speed(speed) for number, speed in enumerate(speeds)}
    return Profile(key="CPUs", devices=devices, kinds=graph.kind_names)


@cache
def medium_gpt() -> ModelGraph:
    """GPT-2 medium (Radford et al., 2019) on half of its context."""
    return _gpt(width=1024, layers=24, heads=16, vocab=50304, length=512)


@cache
def small_gpt() -> ModelGraph:
    """As emulated workers train it."""
    return _gpt(width=256, layers=8, heads=4, vocab=1024, length=64)


def _gpt(*, width: int, layers: int, heads: int, vocab: int, length: int) -> ModelGraph:
    config = GPT2Config(
        vocab_size=vocab, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    tokens = torch.zeros(2, length, dtype=torch.long)
    return trace(model, {"input_ids": tokens, "labels": tokens}).graph


@cache
def pyramid() -> ModelGraph:
    """Convolutions whose work and weights change from block to block."""
    return _images(Pyramid(lambda channels: nn.GroupNorm(8, channels)))


@cache
def with_statistics() -> ModelGraph:
    """The same with BatchNorm: the number of micro-batches is part of the mathematics."""
    return _images(Pyramid(nn.BatchNorm2d))


class Pyramid(nn.Module):
    """Images become half as wide and high, and twice as deep, three times."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        blocks: list[nn.Module] = []
        before = 32
        for channels, deep in ((32, 2), (64, 3), (128, 4), (256, 3)):
            for number in range(deep):
                down = number == 0 and channels != before
                conv = nn.Conv2d(before, channels, 3, padding=1, stride=2 if down else 1)
                blocks.append(nn.Sequential(conv, norm(channels), nn.ReLU()))
                before = channels
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, 100)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden.mean((2, 3))), labels)


def _images(model: nn.Module) -> ModelGraph:
    batch = {"x": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}
    return trace(model.train(), batch).graph
