"""The peak of memory of each device, as the cost model predicts it and as an allocator counts it, for plans of every kind.

No GPU is needed: the accelerator of the tests (`tests/device`) counts what is allocated in it, and what was allocated at most. What
blocks keep and need is measured on it as on any device, at every size; then each plan runs three steps, and the peak of the last two is
compared. What the framework occupies before there is a model is left out on both sides. So are the 5% that the planner counts for what
the allocator of a GPU loses to gaps: this one loses nothing but the rounding of each tensor to 512 bytes, which is counted.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results import Results, arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from device.accelerator import built, unavailable  # noqa: E402
from device.test_exactness import A  # noqa: E402
from heterodyne.api.stage_cutting import StageCutter  # noqa: E402
from heterodyne.cluster.profile import WHOLE, BlockSample, DeviceProfile, LinkSample, Profile  # noqa: E402
from heterodyne.cost.memory import MemoryAssumptions  # noqa: E402
from heterodyne.cost.model import CostModel  # noqa: E402
from heterodyne.cost.recipe import Recipe  # noqa: E402
from heterodyne.frontend import Captured, trace  # noqa: E402
from heterodyne.job import OptimizerSection  # noqa: E402
from heterodyne.measure.block_run import BlockProgram, BlockRun  # noqa: E402
from heterodyne.measure.clock import clock_of  # noqa: E402
from heterodyne.measure.whole_model import WholeModel, without_weights  # noqa: E402
from heterodyne.model_output import loss_of  # noqa: E402
from heterodyne.plan.lower import lower  # noqa: E402
from heterodyne.runtime.comm.communicator import Communicator  # noqa: E402
from heterodyne.runtime.records.peak_memory import forget_peak_memory, peak_memory_bytes  # noqa: E402
from heterodyne.runtime.worker import Worker  # noqa: E402
from heterodyne.search.points import points_of  # noqa: E402
from heterodyne.sim.run import simulate  # noqa: E402
from multiprocess.pool import Pool, World, accelerator  # noqa: E402
from multiprocess.test_training_pipelines import Spread, cut  # noqa: E402
from multiprocess.work import PipelineOf, StageOf, cluster_of, staged_plan  # noqa: E402

DEVICES = 3
SIZES = (1, 2, 4, 8)
BUCKET = 2**20
WIDTH, LAYERS, LENGTH, VOCABULARY = 256, 6, 64, 1024
Case = tuple[str, str, Spread, dict[str, Any]]


def main() -> int:
    options = arguments(__doc__, part="to be added to those that the file has")
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    torch.set_num_threads(1)
    why = unavailable()
    if why is not None:
        print(why)
        return 1
    built()
    results = Results("memory_truth")
    pool = Pool()
    profiles: dict[tuple[str, str], Profile] = {}
    every = list(enumerate([*cases("gpt2"), *cases("vit")[::4]]))
    wanted = every[: options.cases.stop][options.cases.start :] if options.cases else every
    try:
        for number, (name, model, spread, more) in every[:32:4] if options.quick else wanted:
            kind = (model, more.get("precision", "fp32"))
            if kind not in profiles:
                (profiles[kind],) = pool.run(1, measured, *kind, devices=(A,), timeout_s=600.0)
            found = pool.run(
                DEVICES, compared, model, spread, more, profiles[kind], devices=(A,) * DEVICES, timeout_s=300.0
            )
            results.row(
                f"{name}, {model}",
                part=number,
                predicted_mib=[round(predicted / 2**20, 1) for predicted, _ in found],
                measured_mib=[round(most / 2**20, 1) for _, most in found],
                ratios=[round(predicted / most, 4) for predicted, most in found if most],
            )
    finally:
        pool.close()
    if options.json is not None and options.cases:
        results.take_over(options.json, options.cases)
        results.rows.sort(key=lambda row: row["part"])
    ratios = [ratio for row in results.rows for ratio in row["ratios"]]
    results.bar("peak predicted over measured, least", min(ratios), ">= 1")
    results.bar("peak predicted over measured, most", max(ratios), "<= 1.05")
    results.bar("devices within 0 to +5%", sum(1 <= each <= 1.05 for each in ratios) / len(ratios), ">= 1")
    return results.write(options.json)


def cases(model: str) -> list[Case]:
    """Plans of every kind, by name."""
    graph = traced(model)[1].graph
    ops = len(graph.ops)
    alone = StageOf(ops, (0,), (1,))

    def borders(stages: int) -> list[float]:
        """Between blocks."""
        positions = [p / ops for p in points_of(graph).positions[1:-1]]
        return [min(positions, key=lambda p: abs(p - n / stages)) for n in range(1, stages)]

    def replicas(*sizes: tuple[int, ...], **more: Any) -> Spread:
        again = tuple(range(len(graph.blocks))) if more.pop("again", False) else ()
        stages = [replace(alone, ranks=(rank,), recompute=again, **more) for rank in range(len(sizes))]
        return "1F1B", tuple(PipelineOf(own, (stage,)) for own, stage in zip(sizes, stages, strict=True))

    def pipeline(schedule: str, homes: tuple[tuple[int, ...], ...], count: int = 6, **more: Any) -> Spread:
        at = borders(len(homes))
        return schedule, (PipelineOf((2,) * count, cut(graph, at, homes, **more)),)

    def layered(count: int = 1, **more: Any) -> Spread:
        at = [position / ops for position in points_of(graph).positions[1:-1]]
        stages = cut(graph, at, ((0, 1, 2),) * (len(at) + 1), **more)
        return "GPipe", (PipelineOf((12 // count,) * count, stages),)

    def shares(spread: Spread, *parts: int, **more: Any) -> Spread:
        schedule, pipelines = spread
        return schedule, tuple(
            replace(p, stages=tuple(replace(s, state=tuple(parts[r] for r in s.ranks), **more) for s in p.stages))
            for p in pipelines
        )

    def in_parts(kind: str, *parts: int) -> Spread:
        return "1F1B", (PipelineOf((2, 2), (StageOf(ops, (0, 1, 2), parts, kind=kind),)),)

    data, chain = replicas((4,), (2,), (1,)), pipeline("1F1B", ((0,), (1,), (2,)))
    loop = ((0,), (1,), (2,)) * 2
    found: list[tuple[str, Spread, dict[str, Any]]] = [
        ("data parallel", data, {}),
        ("data parallel, several micro-batches", replicas((4, 4), (2, 2, 2), (1, 1)), {}),
        ("data parallel, recompute", replicas((8,), (4,), (4,), again=True), {}),
        ("data parallel, SGD", data, {"optimizer": "sgd"}),
        ("data parallel, Adafactor", data, {"optimizer": "adafactor"}),
        ("data parallel, large buckets", data, {"bucket_bytes": 2**24}),
        ("pipeline, 1F1B", chain, {}),
        ("pipeline, GPipe", pipeline("GPipe", ((0,), (1,), (2,))), {}),
        ("pipeline, 1F1B, recompute", pipeline("1F1B", ((0,), (1,), (2,)), recompute=True), {}),
        ("pipeline, interleaved", pipeline("Interleaved1F1B", loop), {}),
        ("pipeline, zero bubble", pipeline("ZBH1", ((0,), (1,), (2,))), {}),
        ("pipeline, interleaved zero bubble", pipeline("InterleavedZeroBubble", loop), {}),
        ("pipeline, wide stages", pipeline("1F1B", ((0,), (1, 2))), {}),
        ("pipeline, SGD", chain, {"optimizer": "sgd"}),
        ("tensor parallel", in_parts("split", 1, 1, 1), {}),
        ("tensor parallel, unequal", in_parts("split", 2, 1, 1), {}),
        ("context parallel", in_parts("context", 1, 1, 1), {}),
        ("context parallel, unequal", in_parts("context", 2, 1, 1), {}),
        ("ZeRO-1", shares(data, 1, 1, 1), {"zero": 1}),
        ("ZeRO-1, unequal", shares(data, 4, 1, 0), {"zero": 1}),
        ("ZeRO-1, offload", shares(data, 2, 1, 1, offload=True), {"zero": 1}),
        ("ZeRO-1, wide stages", shares(pipeline("1F1B", ((0,), (1, 2))), 1, 3, 1), {"zero": 1}),
        ("ZeRO-2", shares(data, 1, 1, 1), {"zero": 2}),
        ("ZeRO-2, unequal", shares(data, 4, 1, 1), {"zero": 2}),
        ("ZeRO-2, several micro-batches", shares(replicas((4, 4), (2, 2), (1, 1)), 1, 1, 1), {"zero": 2}),
        ("ZeRO-3", shares(layered(), 1, 1, 1), {"zero": 3}),
        ("ZeRO-3, unequal", shares(layered(), 4, 2, 1), {"zero": 3}),
        ("ZeRO-3, recompute", shares(layered(recompute=True), 2, 1, 1), {"zero": 3}),
        ("ZeRO-3, several micro-batches", shares(layered(3, recompute=True), 2, 1, 1), {"zero": 3}),
        ("ZeRO-3, SGD", shares(layered(), 1, 1, 1), {"zero": 3, "optimizer": "sgd"}),
        ("bf16", data, {"precision": "bf16"}),
        ("bf16, pipeline", chain, {"precision": "bf16"}),
    ]
    return [(name, model, spread, more) for name, spread, more in found]


def compared(world: World, model: str, spread: Spread, more: dict[str, Any], profile: Profile) -> tuple[int, int]:
    """Bytes of this rank: the peak as predicted, and as counted."""
    accelerator(world.device)
    module, captured, batch = traced(model)
    graph, cluster, device = captured.graph, cluster_of(DEVICES, world.devices), torch.device(world.device)
    more = {"bucket_bytes": BUCKET, "precision": "fp32", "zero": 0, "optimizer": "adamw", **more}
    section = OptimizerSection(name=more.pop("optimizer"), lr=1e-3, momentum=0.9)
    recipe = Recipe(optimizer=section.name, precision=more["precision"], bucket_bytes=more["bucket_bytes"])
    plan = staged_plan(graph, cluster, spread[1], spread[0], **more)
    lowered = lower(plan, graph, cluster, clip=True)
    communicator = Communicator(rank=world.rank, world_size=world.world_size, device=device)
    costs = CostModel(
        graph=graph,
        cluster=cluster,
        profile=profile,
        recipe=recipe,
        memory=MemoryAssumptions(fragmentation=0.0),
    )
    own = cluster.devices[world.rank].id
    predicted = simulate(lowered.program, costs.of(plan, lowered.weights)).peak_bytes[world.rank]
    predicted -= costs.memory_use(own, 0).context
    gc.collect()  # what the worker before this one has left in cycles
    before = torch.accelerator.memory_allocated(device)
    worker = Worker(
        traced.__wrapped__(model)[0],
        lowered=lowered,
        communicator=communicator,
        loss_count=captured.loss_count,
        optimizer=section,
        total_steps=10,
        clip_grad_norm=1.0,
        stage_programs=StageCutter(captured, module),
    )
    samples = {name: value[: plan.global_batch_size] for name, value in batch.items()}
    worker.step(samples)
    forget_peak_memory(device)
    for _ in range(2):
        worker.step(samples)
    most = peak_memory_bytes(device) - before
    worker.close()
    communicator.close()
    return predicted, most


def measured(world: World, model: str, precision: Any) -> Profile:
    """Memory as a device measures it for itself, at every size; no time matters here, so none is measured."""
    device = torch.device(accelerator(world.device).name)
    module, captured, batch = traced(model)
    graph = captured.graph
    whole = WholeModel(
        build=lambda where: traced.__wrapped__(model)[0].to(where),  # noqa: PLW0108 (a new one each time)
        inputs=graph.inputs,
        example={name: value[:4] for name, value in batch.items()},
        loss=loss_of,
        build_empty=lambda: without_weights(module),
    )
    programs = {**{kind: captured.block(block) for kind, block in graph.kinds.items()}, WHOLE: whole}
    own = DeviceProfile(
        blocks={
            kind: tuple(sample(program, size, device, precision) for size in SIZES)
            for kind, program in programs.items()
        },
        optimizer_s_per_byte=1e-9,
        host_update_s_per_byte=1e-9,
    )
    # All devices are alike.
    ids = tuple(device.id for device in cluster_of(DEVICES, (A,) * DEVICES).devices)
    pairs = [(a, b) for a in ids for b in ids if a != b]
    links = [
        LinkSample(op=op, devices=of, bytes=size, seconds=1e-4 + 1e-9 * size, spread=0.0)
        for size in (1000, 1_000_000)
        for op, of in (("all_reduce", ids), *(("send", pair) for pair in pairs))
    ]
    return Profile(key="", devices=dict.fromkeys(ids, own), links=tuple(links))


def sample(program: BlockProgram, size: int, device: torch.device, precision: Any) -> BlockSample:
    run = BlockRun(program, size, device, precision=precision, seed=0, clock=clock_of(device))
    (kept, copied), peak, _ = run.memory()
    return BlockSample(
        micro_batch_size=size,
        forward_s=1e-3 * size,
        backward_s=2e-3 * size,
        input_s=1e-3 * size,
        weight_s=1e-3 * size,
        spread=0.0,
        saved_bytes=kept,
        copied_bytes=copied,
        peak_bytes=peak,
    )


@functools.cache
def traced(model: str) -> tuple[torch.nn.Module, Captured, dict[str, torch.Tensor]]:
    """A model, what its capture says, and a batch."""
    torch.manual_seed(0)
    module, batch = {"gpt2": gpt2, "vit": vit}[model]()
    module.train()
    return module, trace(module, {name: value[:4] for name, value in batch.items()}, name=model), batch


def gpt2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=4,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (24, LENGTH))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def vit() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=64, patch_size=8, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
        intermediate_size=4 * WIDTH, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(24, 3, 64, 64),
        "labels": torch.randint(0, 10, (24,)),
    }


if __name__ == "__main__":
    sys.exit(main())
