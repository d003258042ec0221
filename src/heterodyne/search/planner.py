"""Chooses a plan: how to spread one global batch over unequal devices, and why.

The candidates (`search.families`) are lowered to their programs and played on the simulator; the fastest that fits is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite

from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.collective import Collectives
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerName, Strategy
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import Precisions, in_words
from heterodyne.search.asynchronous import asynchronous
from heterodyne.search.explain import reason
from heterodyne.search.families import Families
from heterodyne.search.fit import Fit, nothing_fits
from heterodyne.search.host_room import lacking_on_hosts
from heterodyne.search.planned import Candidate, Planned, Rehearsed, identity, serves
from heterodyne.search.predict import compute_seconds, own_rates, predict
from heterodyne.units import counted

__all__ = ["plan"]

_MOST_MICRO_BATCHES = 2**16
"""Of a device in a step. A program lists each, and searching takes seconds for so many."""


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
    rehearsed: Mapping[str, Rehearsed] | None = None,
    able: Capabilities | None = None,
    near: float = 1.0,
) -> Planned:
    """The fastest plan by prediction, or the fastest of those that ``strategy`` names. The same arguments give the same plan.

    Args:
        micro_batch_sizes: those of the plan; None: those that were measured on any device.
        bucket_bytes: of a gradient bucket; None: what the links ask for.
        given: a plan that somebody wrote is taken as it is, whatever its memory, and weighed against what would have been chosen.
        rehearsed: what was seen of plans that were run, by their `identity`. The choice is among the fastest of these.
        able: what runs exactly; None: what does for the model, whatever its optimizer.
        near: how many times as long as the fastest a plan may be predicted to take and is still looked for, as a rehearsal wants it.

    Raises InfeasibleError if no plan fits, with what each device lacks; MeasureError where the profile lacks a
    measurement; PlanError if ``given`` cannot run, or hosts have no room for what it keeps there.
    """
    sizes = profile.micro_batch_sizes if micro_batch_sizes is None else micro_batch_sizes
    if global_batch_size < 1 or not sizes or min(sizes) < 1:
        raise ValueError(f"batch {global_batch_size} and micro-batches {tuple(sizes)} must be positive")
    listed = [size for size in sizes if global_batch_size <= _MOST_MICRO_BATCHES * size * len(cluster.devices)]
    if not listed:
        raise InfeasibleError(
            f"a global batch of {global_batch_size:,} samples in micro-batches of at most {max(sizes):,} is more than "
            f"{_MOST_MICRO_BATCHES:,} for each of {counted(len(cluster.devices), 'device')}, and a step lists every one: take a smaller "
            "batch, or let larger micro-batches be measured"
        )
    recipe = Recipe(optimizer=optimizer, momentum=momentum, precision=precision, clip=clip)
    families = Families(
        model=_believed(graph, cluster, profile, recipe, bucket_bytes, memory),
        able=able or Capabilities(graph),
        samples=global_batch_size,
        sizes=tuple(sorted({min(size, global_batch_size) for size in listed})),
        strategy="pipeline" if able is not None and able.asynchronous else strategy,
        near=near,
    )
    return _weighed(families, given, rehearsed or {})


def _believed(
    graph: ModelGraph,
    cluster: Cluster,
    profile: Profile,
    recipe: Recipe,
    bucket_bytes: int | None,
    memory: MemoryAssumptions | None,
) -> CostModel:
    if bucket_bytes is None:
        bucket_bytes = Collectives(cluster=cluster, samples=profile.links).bucket_bytes(graph.trainable_bytes)
    recipe = replace(recipe, bucket_bytes=bucket_bytes)
    return CostModel(graph=graph, cluster=cluster, profile=profile, recipe=recipe, memory=memory or MemoryAssumptions())


def _weighed(families: Families, given: Plan | None, rehearsed: Mapping[str, Rehearsed]) -> Planned:
    """What is chosen of everything that is weighed."""
    ways: Iterable[Candidate]
    if families.able.asynchronous:
        ways = asynchronous(families.model, families.runs, families.sizes, families.samples)
    else:
        ways = families.candidates(on_hosts=given is None)
    candidates = tuple(
        c if c.plan is None else replace(c, rehearsed=rehearsed.get(identity(c.plan)))
        for c in map(partial(_with_host_room, families.model), ways)
    )
    if given is None:
        chosen = _chosen(candidates, families.strategy, families.fits, families.model.recipe)
    else:
        made, played = predict(families.model, given, families.runs)
        if lacking := lacking_on_hosts(families.model, made, played):
            raise PlanError(f"the plan cannot run: {lacking}")
        chosen = Candidate(name="the given plan", kind="given", plan=made, simulation=played)
        candidates = (chosen, *candidates)
    return _planned(families, chosen, candidates)


def _chosen(candidates: Sequence[Candidate], strategy: Strategy, fits: Sequence[Fit], recipe: Recipe) -> Candidate:
    """The fastest candidate that serves the strategy, by doubted prediction; ties go to fewer idle devices, then to the first. Where some
    were rehearsed, the first of those that the rehearsal cannot tell from the fastest.

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
    possible = [c for c in possible if c.rehearsed is not None] or possible
    possible = [c for c in possible if c.rehearsed is not None and c.rehearsed.as_fast] or possible
    if possible:
        return min(possible, key=lambda c: (c.weighed_s, len(c.left_out)))
    if not any(fit.sizes for fit in fits):
        why = next((c.why_not for c in serving if c.kind == "pipeline"), "")
        hosts = "; ".join(c.why_not for c in serving if c.short_of_host)
        raise nothing_fits(fits, recipe.optimizer, in_words(recipe.precision), pipeline=why, hosts=hosts)
    first_of = {c.why_not: c.name for c in reversed(serving)}  # what several lack is said once
    raise InfeasibleError(
        f"no plan with strategy {strategy!r}: "
        + (
            "; ".join(f"{name}: {why}" for why, name in reversed(first_of.items()))
            or "more than one stage or part needs two devices and two ops at least"
        )
    )


def _with_host_room(model: CostModel, candidate: Candidate) -> Candidate:
    """The candidate; why it cannot be, where hosts have no room for what it keeps there."""
    if candidate.plan is None or candidate.simulation is None:
        return candidate
    lacking = lacking_on_hosts(model, candidate.plan, candidate.simulation)
    return replace(candidate, plan=None, simulation=None, why_not=lacking, short_of_host=True) if lacking else candidate


def _planned(families: Families, chosen: Candidate, candidates: Sequence[Candidate]) -> Planned:
    """With the reason for the choice, and what is told of it."""
    assert chosen.plan is not None  # only such are chosen
    assert chosen.simulation is not None
    model, runs, simulation = families.model, families.runs, chosen.simulation
    assert chosen.plan.predicted is not None  # every plan that was simulated is
    bound = sum(model.compute[device.id].rate() for device in model.cluster.devices)
    known = chosen.plan.predicted.model_copy(update={"bound_samples_per_s": bound if isfinite(bound) else None})
    why = reason(chosen, candidates, families.strategy)
    final = chosen.plan.model_copy(update={"reason": why, "predicted": known})
    chosen = replace(chosen, plan=final)
    return Planned(
        plan=final,
        chosen=chosen,
        candidates=tuple(chosen if c.simulation is simulation else c for c in candidates),
        strategy=families.strategy,
        graph=model.graph,
        cluster=model.cluster,
        rates=own_rates(model, final, runs),
        compute_s=compute_seconds(model, final),
        unfit={f.device.id: f.say() for f in families.fits if not f.sizes and f.device.id not in final.devices},
    )
