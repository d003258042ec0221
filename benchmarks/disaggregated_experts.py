"""Attention on some workers, experts on others: against every other plan that the planner makes, in simulation against expert parallelism.

Two fast and two slow emulated workers (CPU quotas) train a Hugging Face Mixtral of 8 layers whose experts are most of its work on the fast
ones. The slow ones have no fused kernel for attention, as old accelerators have none. The ways are the best plan with experts on a place of
their own, and of each other kind the best that the same search finds; they take turns in the same processes. Loss and gradients, with the
loss that balances the experts, are compared with those of one device. In simulation the devices are A40 and V100 at 200 Gb/s
(HeterMoE, Wu et al., 2025): expert parallelism there has all shares by speed, the best size of micro-batches, and as much memory as it
wants; as a bound it also is compared with work that is shared by speed, and tokens that cross at the full rate of the links.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from emulation import emulated, ratios, worker_arguments
from hand_made import Rig
from pace import Pace, run_in_turns
from pictures import step_picture
from results import ROOT, Results, arguments, spread

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.lower import lower
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Layout, Pipeline, Plan, Region, Stage
from heterodyne.predictor.datasheet_profile import believed_cluster, datasheet_profile
from heterodyne.search.by_speed import shares_by
from heterodyne.search.expert_places import ExpertPlaces
from heterodyne.search.planned import Candidate
from heterodyne.search.planner import plan
from heterodyne.search.predict import plan_of
from heterodyne.search.refine import Refiner
from heterodyne.search.split import Split
from heterodyne.sim.run import simulate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from heterodyne.api.session import Session

APART = "experts apart"
OTHERS = {"balanced": "data parallel", "pipeline": "pipeline", "replicas": "pipelines", "split": "split"}
SPEEDS, FUSED = (0.45, 0.45, 0.35, 0.35), 2
"""Of the workers; so many of them, the first, have a fused kernel for attention."""
GPUS = ("A40", 48), ("V100-SXM2-32GB", 32)
LINK = Wire(bandwidth_bytes_per_s=200e9 / 8, latency_s=10e-6)
MODELS = ((2048, 4096, 4096), (2048, 4096, 8192), (1024, 2048, 4096), (1024, 2048, 8192))
"""Width, inner width of an expert, and length of the simulated ones."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """``steps`` of each way in each of the ``rounds``, of ``samples`` sequences of ``length`` tokens each."""

    width: int
    inner: int
    experts: int
    layers: int
    samples: int
    length: int
    rounds: int
    steps: int
    budget_s: float


FULL = Size(width=128, inner=512, experts=8, layers=8, samples=8, length=1024, rounds=6, steps=1, budget_s=60)
QUICK = Size(width=64, inner=192, experts=8, layers=8, samples=8, length=256, rounds=2, steps=1, budget_s=8)


def main() -> int:
    options = arguments(__doc__)
    results = Results("disaggregated_experts")
    gains = []
    for width, inner, length in MODELS[:1] if options.quick else MODELS:
        found = simulated(width, inner, length)
        gains.append(found["expert parallel"] / found[APART])
        results.row(f"simulated: width {width}, {length} tokens", **found, gain=gains[-1])
    results.bar("simulated: over expert parallelism with shares by speed, mean", fmean(gains), ">= 1.15")

    size = QUICK if options.quick else FULL
    job = emulated(SPEEDS, [APART], size, Path(__file__))
    other = min((way for way in OTHERS.values() if way in job), key=lambda way: median(job[way]))
    for way, name in job["names"].items():
        predicted = job["predicted"][way]
        results.row(f"emulated: {way}", step_s=spread(job[way]), predicted_s=predicted, plan=name)
    gain = ratios([job], other, APART)
    results.row(f"emulated: {other} / {APART}", step_ratio=spread(gain))
    results.bar(f"emulated: over the best other plan ({other})", median(gain), ">= 1.2")
    results.bar("largest error of loss and gradients, with the balance loss", job["error"], "<= 1e-5")
    return results.write(options.json)


# ---- simulated -------------------------------------------------------------------------------------------------------------


def simulated(width: int, inner: int, length: int, *, layers: int = 8, samples: int = 16) -> dict[str, float]:
    """Seconds of a step of two A40 and two V100."""
    size = replace(FULL, width=width, inner=inner, length=length, layers=layers, samples=samples)
    apart = apart_in(costs_of(size, marked=False), samples)
    assert apart.step_s is not None, apart.why_not
    model = costs_of(size, marked=True)
    rest, experts = ({d: parts[n] for d, parts in seconds_of(model).items()} for n in (0, 1))
    devices = tuple(rest)
    steps = []
    for micro_batch in (4, 8, 16):
        shares = (shares_by([1 / of[device] for device in devices]) for of in (rest, experts))
        steps.append(expert_parallel_s(model, samples, micro_batch, *shares))
    whole_s = samples / sum(1 / (rest[device] + experts[device]) for device in devices)
    crossing = (
        samples * length * 2 * width * 2 * 4 * layers / 2
    )  # both ways, forward and backward, half of the choices cross
    return {
        APART: apart.step_s,
        "expert parallel": min(steps),
        "work by speed, tokens at the rate of the link": whole_s + crossing / LINK.bandwidth_bytes_per_s,
    }


def costs_of(size: Size, *, marked: bool) -> CostModel:
    """What datasheets say. ``marked``: the experts are, so that a plan can lay them out otherwise than the rest."""
    import torch

    from heterodyne.frontend import trace

    pools = tuple(
        Pool(name=f"n{n}", kind=kind, nodes=1, devices_per_node=2, memory_bytes=room * 2**30)
        for n, (kind, room) in enumerate(GPUS)
    )
    fleet = Fleet(name="two kinds", pools=pools, links={("n0", "n1"): LINK})
    with torch.device("meta"):
        module = mixtral(size, vocabulary=32000, heads=16, marked=marked)
        tokens = torch.zeros(4, size.length, dtype=torch.long)
    graph, recipe = trace(module, {"input_ids": tokens, "labels": tokens}).graph, Recipe(precision="fp16")
    profile = datasheet_profile(graph, fleet, sizes=(1, 2, 4, 8, 16), recipe=recipe)
    return CostModel(graph=graph, cluster=believed_cluster(fleet), profile=profile, recipe=recipe)


def apart_in(model: CostModel, samples: int, kinds: Collection[str] = ("pipeline", "split")) -> Candidate:
    split = Split(model=model, runs={}, samples=samples, sizes=(1, 2, 4, 8))
    found = ExpertPlaces(split=split, able=Capabilities(model.graph), refiner=Refiner(model=model)).candidates()
    return min((c for c in found if c.kind in kinds), key=lambda candidate: candidate.weighed_s)


def seconds_of(model: CostModel) -> dict[str, tuple[float, float]]:
    """Of a sample on each device: in all but the experts, and in the experts."""
    at = [number for number, op in enumerate(model.graph.ops) if op.kind == "experts"]
    found = {}
    for device, compute in model.compute.items():
        experts = sum(compute.seconds(kind, (n, n + 1), 1) for n in at for kind in ("F", "B"))
        found[device] = compute.micro_batch_s(1) - experts, experts
    return found


def expert_parallel_s(
    model: CostModel, samples: int, micro_batch: int, rest: tuple[int, ...], experts: tuple[int, ...]
) -> float:
    """Seconds of a step of expert parallelism with these shares of samples and of experts."""
    devices = tuple(device.id for device in model.cluster.devices)
    marked = (Region(task_graph=t.name, layout=Layout(kind="split", shares=experts)) for t in model.graph.task_graphs)
    stage = Stage(
        ops=(0, len(model.graph.ops)),
        devices=devices,
        regions=(Region(layout=Layout(shares=rest)), *marked),
        exchange=Split(model=model, runs={}, samples=samples, sizes=(1,)).exchange(devices),
    )
    made = plan_of(
        model, samples, (Pipeline(micro_batches=MicroBatches.of_samples(samples, micro_batch), stages=(stage,)),)
    )
    lowered = lower(made, model.graph, model.cluster)
    return simulate(lowered.program, model.of(made, lowered.weights)).step_s


def picture() -> Path:
    """A step of 4 layers, as it is simulated."""
    model = costs_of(replace(FULL, width=2048, inner=4096, length=4096, layers=4), marked=False)
    found = apart_in(model, 16)
    assert found.simulation is not None
    timeline = found.simulation.timeline([device.id for device in model.cluster.devices])
    return step_picture(timeline, ROOT / "docs" / "pictures" / "experts.png", title="attention on A40, experts on V100")


# ---- emulated --------------------------------------------------------------------------------------------------------------


def mixtral(
    size: Size, *, balanced: bool = False, vocabulary: int = 256, heads: int = 4, marked: bool = False
) -> torch.nn.Module:
    """``balanced``: with the loss that balances its experts."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    import heterodyne as hd

    class Marked(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *given: Any) -> Any:
            with hd.split(4):
                return self.inner(*given)

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=size.length,
        num_local_experts=size.experts, num_experts_per_tok=2, tie_word_embeddings=False, attn_implementation="sdpa",
        use_cache=False, output_router_logits=balanced,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    for layer in model.model.layers if marked else ():
        layer.mlp.experts = Marked(layer.mlp.experts)
    return model


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch

    import heterodyne as hd

    def batch_of(samples: int, length: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 256, (samples, length), generator=torch.Generator().manual_seed(1))
        return {"input_ids": tokens, "labels": tokens}

    def as_old() -> None:
        torch.backends.cuda.enable_flash_sdp(session.rank < FUSED)  # it is that of processors too

    batch, sizes = batch_of(size.samples, size.length), (1, 2)
    with hd.open_session() as session:
        error = largest_error(session, replace(size, width=32, inner=48), batch_of(8, 32))
        rig = Rig.of(session, mixtral(size), batch, sizes, size.budget_s, captured_then=as_old)
        found = best_of_each(rig, size.samples, sizes) if session.rank == 0 else {}
        texts = {way: own.plan.dump() for way, own in found.items() if own.plan is not None}
        texts = session.communicator.broadcast_object(texts, 0)
        plans = {way: Plan.parse(text) for way, text in texts.items()}
        pace = Pace(rig, mixtral(size), {name: value[:2] for name, value in batch.items()})
        workers = {way: rig.worker(own, mixtral(size)) for way, own in plans.items()}
        run: dict[str, Callable[[], object]] = {way: (lambda w=w: w.step(batch)) for way, w in workers.items()}
        names = {way: own.name for way, own in found.items()}
        rounds, steps = size.rounds, size.steps
        run_in_turns(rig, run, plans, pace, options.out, rounds=rounds, steps=steps, names=names, error=error)
        for made in workers.values():
            made.close()


def best_of_each(rig: Rig, samples: int, sizes: tuple[int, ...]) -> dict[str, Candidate]:
    """The best plan with experts apart, and of each other kind the best, however much slower."""
    graph, cluster = rig.captured.graph, rig.session.cluster
    planned = plan(
        graph, cluster, rig.profile, global_batch_size=samples, micro_batch_sizes=sizes, clip=False, near=3.0
    )
    best: dict[str, Candidate] = {}
    for candidate in sorted((c for c in planned.candidates if c.plan is not None), key=lambda c: c.weighed_s):
        way = APART if candidate.name.startswith("attention on") else OTHERS.get(candidate.kind)
        if way is not None:
            best.setdefault(way, candidate)
    return best


def largest_error(session: Session, size: Size, batch: dict[str, Tensor]) -> float:
    """Relative, of the loss and of every gradient against one device, with the loss that balances the experts. Collective."""
    from heterodyne.runtime.exact.verify import compare, one_device_gradients

    rig = Rig.of(session, mixtral(size, balanced=True), batch, (2,), 4.0)
    made = rig.worker(rig.agreed(apart_in(rig.costs, size.samples, ("pipeline",)).plan), mixtral(size, balanced=True))
    loss, gradients = made.gradients(batch)
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    expected_loss, expected = one_device_gradients(
        mixtral(size, balanced=True),
        batch,
        graph=rig.captured.graph,
        placement=made.placement,
        device=session.device,
        precision="fp32",
        loss_count=rig.captured.loss_count,
        seed=0,
        step=0,
    )
    made.close()
    found = compare(loss, gradients, expected_loss, {name: expected[name] for name in gradients})
    own = max(found.loss, *(error for _, error in found.gradients))
    return max(session.communicator.all_gather_object(own))


if __name__ == "__main__":
    own = worker_arguments()
    sys.exit(main() if own is None else worker(own, Size(**own.size)))
