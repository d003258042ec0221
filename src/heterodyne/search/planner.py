"""Chooses a plan: how to spread one global batch over unequal devices, and why so.

Two ways are weighed against each other: data parallelism (`search.data_parallel`), where each device runs the whole model for its
share of the batch, and pipelines (`search.pipelines`, `search.replicas`), where the model itself is cut. Every proposal is lowered to
its program and played on the simulator; the fastest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.again import parts_again
from heterodyne.cost.bucket_size import bucket_bytes_for
from heterodyne.cost.collective import Collectives
from heterodyne.cost.memory import MemoryAssumptions, MemoryUse
from heterodyne.cost.model import CostModel
from heterodyne.cost.position import worked_on
from heterodyne.cost.recipe import OptimizerName, Recipe
from heterodyne.errors import InfeasibleError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.buckets import planned_buckets
from heterodyne.plan.capabilities import Capabilities, Feature
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.plan.precision import Precisions, in_words
from heterodyne.plan.state_shards import state_parts
from heterodyne.search.by_class import ByClass
from heterodyne.search.data_parallel import DataParallel
from heterodyne.search.explain import reason
from heterodyne.search.fit import Fit, fit_devices, nothing_fits, passes_s
from heterodyne.search.offload import offloading, short_of_memory
from heterodyne.search.parameter_sharding import ParameterSharding
from heterodyne.search.pipelines import Pipelines
from heterodyne.search.planned import Candidate, Planned, Strategy, identity, serves
from heterodyne.search.predict import compute_seconds, own_rates, predict, stage_of
from heterodyne.search.replicas import Replicas
from heterodyne.search.runs import Runs
from heterodyne.search.split import Split
from heterodyne.search.split_pipelines import SplitPipelines
from heterodyne.search.state_sharding import StateSharding
from heterodyne.sim.run import Simulation

__all__ = ["plan"]

_AS_FAST = 1.01
"""In a rehearsal, which takes too few steps to tell less."""


def plan(
    graph: ModelGraph,
    cluster: Cluster,
    profile: Profile,
    *,
    global_batch_size: int,
    micro_batch_sizes: Sequence[int] | None = None,
    optimizer: OptimizerName = "adamw",
    momentum: float = 0.9,
    precision: Precisions = "fp32",
    bucket_bytes: int | None = 4 * 2**20,
    clip: bool = True,
    strategy: Strategy = "auto",
    memory: MemoryAssumptions | None = None,
    given: Plan | None = None,
    rehearsed: Mapping[str, float] | None = None,
    whole_weights: bool = False,
) -> Planned:
    """The fastest plan by prediction, or the fastest of those that ``strategy`` names. The same arguments give the same plan.

    ``micro_batch_sizes``: those of the plan; None: those that were measured on any device.

    ``bucket_bytes``: of a gradient bucket; None: what the links ask for.

    ``given``: a plan that somebody wrote is taken as it is, whatever its memory, and weighed against what would have been chosen.

    ``rehearsed``: seconds of a step of plans that were run, by their `identity`. They count for more than predictions: the choice is
    among these alone.

    ``whole_weights``: the optimizer updates whole weights only, so plans that split them are left out.

    Raises InfeasibleError if no plan fits, with what each device lacks; MeasureError where the profile lacks a
    measurement; PlanError if ``given`` cannot run.
    """
    micro_batch_sizes = profile.micro_batch_sizes if micro_batch_sizes is None else micro_batch_sizes
    if global_batch_size < 1 or not micro_batch_sizes or min(micro_batch_sizes) < 1:
        raise ValueError(f"batch {global_batch_size} and micro-batches {tuple(micro_batch_sizes)} must be positive")
    recipe = Recipe(optimizer=optimizer, momentum=momentum, precision=precision, clip=clip)
    recipe = replace(
        recipe,
        bucket_bytes=bucket_bytes_for(graph, Collectives(cluster=cluster, samples=profile.links))
        if bucket_bytes is None
        else bucket_bytes,
    )
    model = CostModel(
        graph=graph, cluster=cluster, profile=profile, recipe=recipe, memory=memory or MemoryAssumptions()
    )
    able = Capabilities(graph, whole_weights=whole_weights)
    fits, runs = _fitting(model, micro_batch_sizes, global_batch_size, able)
    sizes = tuple(sorted({min(size, global_batch_size) for size in micro_batch_sizes}))
    sharding = None
    if able.allow("state_sharding") and not whole_weights:
        bare = fit_devices(model, sizes, global_batch_size, recompute=False, offload=False, state=0)
        sharding = StateSharding(model=model, runs=runs, fits=bare, samples=global_batch_size)
    found = _candidates(model, runs, global_batch_size, sizes, strategy, able, sharding)
    whole_models = len(runs) == len(cluster.devices)
    if not whole_models and able.allow("parameter_sharding", "several_stages", "empty_share") and not whole_weights:
        again = able.allow("recompute", "several_micro_batches")
        sharded = ParameterSharding(
            model=model, runs=runs, samples=global_batch_size, largest=max(sizes), recompute=again
        )
        found += (sharded.candidate(),)

    def on_hosts(helped: CostModel) -> tuple[Candidate, ...]:
        own = _fitting(helped, micro_batch_sizes, global_batch_size, able)[1]
        # A model that is cut needs no host, if that can be: its weights and their state are cut too.
        possible = any(c.plan is not None for c in found) and strategy == "auto"
        return _candidates(helped, own, global_batch_size, sizes, "data" if possible else strategy, able, None)

    if given is None and (short := short_of_memory(model, fits)):
        found += tuple(offloading(model, short, runs, on_hosts))
    candidates = tuple(
        c if c.plan is None else replace(c, rehearsed_s=(rehearsed or {}).get(identity(c.plan)))
        for c in (*found, *(() if sharding is None else sharding.of_plans(found)))
    )
    if given is None:
        chosen = _choose(candidates, strategy, fits, recipe)
    else:
        made, played = predict(model, given, runs)
        chosen = Candidate(name="the given plan", kind="given", plan=made, simulation=played)
        candidates = (chosen, *candidates)
    chosen_plan, simulation = chosen.plan, chosen.simulation
    assert chosen_plan is not None  # only such are chosen
    assert simulation is not None
    final = chosen_plan.model_copy(update={"reason": reason(chosen, candidates, strategy)})
    chosen = replace(chosen, plan=final)
    return Planned(
        plan=final,
        chosen=chosen,
        candidates=tuple(chosen if c.simulation is simulation else c for c in candidates),
        strategy=strategy,
        graph=graph,
        cluster=cluster,
        rates=own_rates(model, final, runs),
        compute_s=compute_seconds(model, final),
        composition={d: model.compute[d].composition(max(1, size)) for d, size in _largest(final).items()},
        memory={device: _memory(model, final, simulation, device) for device in final.devices},
        unfit={fit.device.id: fit.say() for fit in fits if not fit.sizes and fit.device.id not in final.devices},
    )


def _fitting(
    model: CostModel, sizes: Sequence[int], samples: int, able: Capabilities
) -> tuple[tuple[Fit, ...], dict[str, Runs]]:
    """What fits each device, and how those that can hold the model best run samples."""
    fits = fit_devices(
        model, sizes, samples, recompute=able.allow("recompute"), offload=able.allow("activation_offload")
    )
    runs = {
        fit.device.id: Runs(
            seconds=_seconds(model, fit),
            sizes=fit.sizes,
            fixed_s=model.fixed_s(fit.device.id),
            activations=fit.activations,
        )
        for fit in fits
        if fit.sizes
    }
    return fits, runs


def _seconds(model: CostModel, fit: Fit) -> Callable[[float], float]:
    """Of forward and backward of a micro-batch, with what is computed again."""
    compute = model.compute[fit.device.id]
    if not fit.activations:
        return compute.micro_batch_s
    if fit.activations.hosted:
        stage = fit.activations.on(stage_of((0, len(model.graph.ops)), (fit.device.id,)))

        def hosted_s(size: float) -> float:
            return (
                passes_s(model, fit.device.id, Pipeline(micro_batches=MicroBatches((int(size),)), stages=(stage,)))
                if size
                else 0.0
            )

        return hosted_s
    again = parts_again(model.graph, (0, len(model.graph.ops)), fit.activations.recompute, fit.activations.keep)
    return lambda size: (
        compute.micro_batch_s(size) + sum(model.again_s(fit.device.id, part, int(size)) for part in again)
    )


def _candidates(
    model: CostModel,
    runs: dict[str, Runs],
    samples: int,
    sizes: tuple[int, ...],
    strategy: Strategy,
    able: Capabilities,
    sharding: StateSharding | None,
) -> tuple[Candidate, ...]:
    """Everything that is weighed: data parallelism first, and pipelines unless something else was asked for."""
    # Pipelines take larger parts of the batch, so where that is mathematics they cannot be compared with whole models.
    alone = strategy == "pipeline" and not able.allow("unequal_counts")
    data = DataParallel(model=model, runs={} if alone else runs, samples=samples)
    of_data: Strategy = "data" if strategy in ("pipeline", "split", "context") else strategy
    found = list(data.candidates(of_data))
    if sharding is not None and not alone:
        found += sharding.of_whole_models(of_data)
    if strategy in ("data", "equal", "fastest") or len(model.cluster.devices) < 2 or len(model.graph.ops) < 2:
        return tuple(found)
    whole_only = able.why_not("several_stages")
    if whole_only is not None:
        kind = strategy if strategy in ("pipeline", "split", "context") else "pipeline"
        return (*found, Candidate(name="pieces of the model", kind=kind, why_not=whole_only))
    counts = _counts(able, found, samples, sizes)
    splits = Split(model=model, runs=runs, samples=samples, sizes=sizes, count=counts[0])
    if strategy != "pipeline":
        by_class = ByClass(split=splits, able=able)
        found += splits.as_marked()
        found += by_class.candidates() if strategy == "auto" else ()
        best_s = min((c.weighed_s for c in found), default=inf) if strategy == "auto" else inf
        classes = by_class.classes if strategy == "auto" and by_class.counts else {}
        found += splits.candidates(_splits(strategy, able), below_s=best_s, classes=classes)
    of_count = [Pipelines(model=model, runs=runs, samples=samples, sizes=sizes, count=count) for count in counts]
    if strategy in ("auto", "split") and able.allow("tensor_parallel"):
        found += SplitPipelines(split=splits, pipelines=of_count[0]).candidates()
    if strategy in ("split", "context"):
        return tuple(found)
    known = [c.step_s for c in found if c.step_s is not None]
    below = min(known, default=inf) if strategy == "auto" else inf
    for pipelines in of_count:
        lines = pipelines.candidates(below)
        if any(c.plan is not None for c in lines):
            break
    below = min([below, *(c.step_s for c in lines if c.step_s is not None)])
    return (*found, *lines, *Replicas(pipelines=pipelines).candidates(below))


def _counts(
    able: Capabilities, found: Sequence[Candidate], samples: int, sizes: Sequence[int]
) -> tuple[int, ...] | tuple[None]:
    """Where ops mix the samples of a micro-batch, the number of micro-batches is part of the mathematics: that of data parallelism
    where there is any, else the smallest that fits; anywhere else it is free (None). Never empty."""
    if able.allow("unequal_counts"):
        return (None,)
    there = [len(p.micro_batches) for c in found if c.plan is not None for p in c.plan.pipelines]
    return tuple(there[:1] or sorted({-(-samples // size) for size in sizes}))


def _splits(strategy: Strategy, able: Capabilities) -> tuple[str, ...]:
    """The kinds of layouts that are tried; sequences may be split where weights may not."""
    features: dict[str, Feature] = {"split": "tensor_parallel", "context": "context_parallel"}
    asked = ("split", "context") if strategy == "auto" else (strategy,)
    return tuple(kind for kind in asked if able.allow(features[kind]))


def _choose(candidates: Sequence[Candidate], strategy: Strategy, fits: Sequence[Fit], recipe: Recipe) -> Candidate:
    """The fastest of those that serve, doubt counted in; of equals the one that leaves out fewest devices, then the first. Where some
    were rehearsed, the first of those that nearly were the fastest then.

    Raises InfeasibleError.
    """
    only = len({c.kind for c in candidates} & {"balanced", "equal", "fewer", "fastest"}) == 1
    serving = [c for c in candidates if serves(c.kind, strategy, only=only)]
    possible = [c for c in serving if c.step_s is not None]
    # What the author of the model has marked is what was asked for, also where something else were faster.
    possible = [c for c in possible if c.kind == "marked"] or possible
    if any(c.kind == "marked" for c in serving) and not any(c.kind == "marked" for c in possible):
        why = "; ".join(f"{c.name}: {c.why_not}" for c in serving if c.kind == "marked")
        raise InfeasibleError(f"the model cannot run as it is marked: {why}")
    rehearsed = [c.rehearsed_s for c in possible if c.rehearsed_s is not None]
    if rehearsed:
        least_s = min(rehearsed) * _AS_FAST
        possible = [c for c in possible if c.rehearsed_s is not None and c.rehearsed_s <= least_s]
    if possible:
        return min(possible, key=lambda c: (c.weighed_s, len(c.left_out)))
    if not any(fit.sizes for fit in fits):
        why = next((c.why_not for c in serving if c.kind == "pipeline"), "")
        raise nothing_fits(fits, recipe.optimizer, in_words(recipe.precision), pipeline=why)
    raise InfeasibleError(
        f"no plan with strategy {strategy!r}: "
        + ("; ".join(f"{c.name}: {c.why_not}" for c in serving) or "pipelines need two devices and two ops at least")
    )


def _largest(made: Plan) -> dict[str, int]:
    """The most samples of a micro-batch that each device of a plan works on."""
    largest = dict.fromkeys(made.devices, 0)
    for pipeline in made.pipelines:
        for number in range(len(pipeline.stages)):
            for device, sizes in worked_on(pipeline, number).items():
                largest[device] = max([largest[device], *sizes])
    return largest


def _memory(model: CostModel, made: Plan, simulation: Simulation, device: str) -> MemoryUse:
    """Part by part. A stage keeps the activations of several micro-batches: as many as add up to the peak of the simulation."""
    state = state_parts(made, model.graph).get(device, 1.0)
    if any(stage.offload for p in made.pipelines for stage in p.stages if device in stage.devices):
        state = 0.0
    mine = [stage for p in made.pipelines for stage in p.stages if device in stage.devices]
    size = _largest(made)[device]
    whole = [(s.ops, s.recompute, s.offload_activations) for s in mine] == [((0, len(model.graph.ops)), (), ())]
    if whole and not mine[0].sharded:
        return model.memory_use(device, size).with_state(state)
    use = model.memory_use(device, size, [stage.ops for stage in mine], boxes=model.boxes_of(made)[device])
    use = use.with_state(state)
    if made.zero:
        own = state_parts(made, model.graph).get(device, 1.0)
        use = model.shared_out(use, made, device, planned_buckets(made, model.graph), own)
    peak = simulation.peak_bytes[model.cluster.rank(device)]
    return replace(use, activations=max(0, peak - use.fixed - use.workspace))
