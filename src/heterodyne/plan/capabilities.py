"""What the runtime runs, as one table: the rules of plans (`plan.check`), the search, what refuses strategies and plans before anything is
measured, and the docs read it.

A *feature* is what a plan may use. A *trait* is what a model or its optimizer is, or what a check has found, and names the features that
are not exact for it, with the reason. A feature that no trait of a model refuses runs exactly, and the search may propose it; any other
plan is refused in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Reach, Strategy
from heterodyne.plan.mesh import count_of
from heterodyne.plan.order import is_asynchronous, orders_of
from heterodyne.plan.plan import Pipeline, Plan, Stage

__all__ = [
    "CUTTING",
    "FEATURES",
    "SHARDING",
    "TRAITS",
    "Capabilities",
    "Feature",
    "Trait",
    "Use",
    "asked_by",
    "has_shares",
    "runs_at_all",
    "table",
    "uses",
]

Feature = Literal[
    "several_stages",
    "tensor_parallel",
    "context_parallel",
    "rows_of_parts",
    "cuts_along_two_axes",
    "recompute",
    "selective_recompute",
    "activation_offload",
    "split_backward",
    "several_micro_batches",
    "early_backward",
    "unequal_counts",
    "unlike_pipelines",
    "empty_share",
    "overlap",
    "overlap_with_recompute",
    "state_sharding",
    "gradient_sharding",
    "parameter_sharding",
    "parameter_sharding_over_pipelines",
    "offload",
    "asynchronous",
]


@dataclass(frozen=True)
class _Words:
    """Args:
    name: for a table. remedy: what to write instead.
    """

    name: str
    remedy: str


FEATURES: Mapping[Feature, _Words] = MappingProxyType(
    {
        "several_stages": _Words("pipeline stages", "let one stage run the whole model"),
        "tensor_parallel": _Words(
            "weights split over devices (TP)", "give the stage one device, or let its devices share samples"
        ),
        "context_parallel": _Words(
            "sequences split over devices (CP)", "give the stage one device, or let its devices share samples"
        ),
        "rows_of_parts": _Words(
            "replicas of such parts inside one stage (DP x TP, DP x CP)",
            "take a pipeline for each replica, or one axis",
        ),
        "cuts_along_two_axes": _Words("both in one stage (TP x CP)", "take one of them, or put replicas outermost"),
        "recompute": _Words("recompute", "recompute nothing"),
        "selective_recompute": _Words("recompute of all but some ops", "leave 'keep' out"),
        "activation_offload": _Words("activations in host memory", "leave 'offload_activations' out"),
        "split_backward": _Words("zero-bubble schedules", "take a schedule whose backward is whole, such as 1F1B"),
        "several_micro_batches": _Words(
            "several micro-batches a replica", "let each replica take all its samples in one"
        ),
        "early_backward": _Words(
            "a backward of the last stage before all its forwards",
            "take a schedule in which every forward comes first, such as GPipe, or one micro-batch",
        ),
        "unequal_counts": _Words(
            "replicas with different numbers of micro-batches", "give every pipeline as many micro-batches"
        ),
        "unlike_pipelines": _Words(
            "replicas that are cut differently", "cut all pipelines alike, in the same order, with the same recompute"
        ),
        "empty_share": _Words(
            "a device without samples of a micro-batch", "make the micro-batches larger, or make the device idle"
        ),
        "overlap": _Words("overlap in halves", "leave 'overlap' out"),
        "overlap_with_recompute": _Words(
            "overlap in halves with recompute or activations in host memory",
            "leave 'overlap' out, or 'recompute' and 'offload_activations'",
        ),
        "state_sharding": _Words("sharded optimizer state (ZeRO-1)", "leave 'zero' and 'state_shares' out"),
        "gradient_sharding": _Words("sharded gradients too (ZeRO-2)", "write 'zero': 1"),
        "parameter_sharding": _Words("sharded parameters too (ZeRO-3)", "write 'zero': 2"),
        "parameter_sharding_over_pipelines": _Words("parameters sharded over several pipelines", "write 'zero': 2"),
        "offload": _Words("optimizer state in host memory", "leave 'offload' out"),
        "asynchronous": _Words(
            "predicted weights (`async`; inexact, only where asked for)",
            "take schedule 1F1B, and leave 'async' out of the job",
        ),
    }
)

SHARDING: tuple[Feature, ...] = ("state_sharding", "gradient_sharding", "parameter_sharding")
"""What a level of state sharding shards: the first one, two or three."""
_IN_PARTS: tuple[Feature, ...] = (
    "tensor_parallel",
    "context_parallel",
    "rows_of_parts",
    "cuts_along_two_axes",
    "overlap",
)
_PIECES: frozenset[Feature] = frozenset(
    (*_IN_PARTS, "several_stages", "recompute", "selective_recompute", "activation_offload", "split_backward")
)
"""What runs pieces of the model's graph in place of the module."""
CUTTING: Mapping[Strategy, Feature] = MappingProxyType(
    {"pipeline": "several_stages", "split": "tensor_parallel", "context": "context_parallel"}
)
"""The strategies that cut the model, each with the feature that it asks for."""


@dataclass(frozen=True, kw_only=True)
class Trait:
    """Something about a model or its optimizer, and what it refuses.

    Args:
        name: for a table.
        why: the reason as a clause; None where the trait is absent.
        refuses: the features that would not be exact.
        of: what has the trait.
    """

    name: str
    why: Callable[[Capabilities], str | None]
    refuses: frozenset[Feature]
    of: Literal["model", "optimizer", "check", "job"] = "model"


def _coupled(able: Capabilities) -> str | None:
    graph = able.graph
    if graph.loss.reduction != "coupled":
        return None
    source = "" if graph.together_from is None else graph.ops[graph.together_from].source
    line = f" ({source})" if source else ""
    return f"samples see each other in the loss of this model{line}"


def _batch_statistics(able: Capabilities) -> str | None:
    graph = able.graph
    if not graph.batch_statistics:
        return None
    name = graph.batch_statistics[0]
    return f"{name} ({graph.op_by_name[name].source}) mixes the samples of a micro-batch over all replicas"


def _opaque(able: Capabilities) -> str | None:
    return None if able.graph.opaque is None else f"there is no graph of this model: {able.graph.opaque}"


TRAITS: tuple[Trait, ...] = (
    Trait(
        name="any model",
        why=lambda _: "this version does not run it",
        refuses=frozenset({"overlap_with_recompute"}),
    ),
    Trait(
        name="statistics over the batch (BatchNorm)",
        why=_batch_statistics,
        refuses=frozenset(
            {"unequal_counts", "unlike_pipelines", "empty_share", "overlap", "cuts_along_two_axes", "asynchronous"}
        ),
    ),
    Trait(
        name="a loss that compares samples",
        why=_coupled,
        refuses=frozenset({*_IN_PARTS, "early_backward", "empty_share", "asynchronous"}),
    ),
    Trait(name="a model that only its module trains", why=lambda able: able.graph.only_whole or None, refuses=_PIECES),
    Trait(
        name="a model whose graph a check has refused",
        why=lambda able: able.module_only or None,
        refuses=_PIECES,
        of="check",
    ),
    Trait(name="a model without a graph", why=_opaque, refuses=_PIECES | {"parameter_sharding", "asynchronous"}),
    Trait(
        name="an optimizer of whole weights",
        why=lambda able: None if able.reach == "element" else "the optimizer updates whole weights only",
        refuses=frozenset({"tensor_parallel"}),
        of="optimizer",
    ),
    Trait(
        name="predicted weights",
        why=lambda able: "weights are predicted ('async')" if able.asynchronous else None,
        refuses=frozenset(
            {*_IN_PARTS, *SHARDING, "offload", "activation_offload", "split_backward", "unlike_pipelines"}
        ),
        of="job",
    ),
    Trait(
        name="an optimizer of the whole model",
        why=lambda able: "the optimizer needs all weights in one place" if able.reach == "model" else None,
        refuses=frozenset({"several_stages", *_IN_PARTS, *SHARDING, "parameter_sharding_over_pipelines"}),
        of="optimizer",
    ),
)


def runs_at_all(feature: Feature) -> bool:
    """Return whether a plan may use it for some model."""
    return feature not in TRAITS[0].refuses


@dataclass(frozen=True)
class Capabilities:
    """What runs exactly for one model.

    ``reach``: what its optimizer must see at once; ``asynchronous``: whether weights are predicted between steps; ``module_only``: why no
    plan may run pieces of its graph, as a check has found; "" if they may.
    """

    graph: ModelGraph
    reach: Reach = "element"
    module_only: str = ""
    asynchronous: bool = False

    def refusing(self, *features: Feature) -> Trait | None:
        """The first trait that refuses any of them; None if a plan may use all of them."""
        return next((t for t in TRAITS if not t.refuses.isdisjoint(features) and t.why(self) is not None), None)

    def why_not(self, feature: Feature) -> str | None:
        """Return why a plan may not use it, as a clause; None if it may."""
        trait = self.refusing(feature)
        return None if trait is None else trait.why(self)

    def allow(self, *features: Feature) -> bool:
        """Return whether a plan may use all of them."""
        return self.refusing(*features) is None

    def cuts(self, strategy: Strategy) -> bool:
        """Return whether plans of a strategy may cut the model."""
        return any(self.allow(feature) for feature in CUTTING.values()) if strategy == "auto" else strategy in CUTTING

    def faults(self, plan: Plan) -> list[str]:
        """Return what the plan uses and may not, as sentences."""
        able = replace(self, asynchronous=self.asynchronous or is_asynchronous(plan))
        return [
            f"{use.where} {use.how}, and {why}: {FEATURES[use.feature].remedy}"
            for use in uses(plan)
            if (why := able.why_not(use.feature)) is not None
        ]


def asked_by(strategy: Strategy, graph: ModelGraph) -> tuple[Feature, ...]:
    """The features that every plan of a strategy uses: where nothing else is asked for, those that the model is marked with."""
    if strategy == "auto" and graph.task_graphs:
        return ("tensor_parallel",)
    return (CUTTING[strategy],) if strategy in CUTTING else ()


@dataclass(frozen=True, kw_only=True)
class Use:
    """A feature that a plan uses: where, and how as a verb."""

    feature: Feature
    where: str
    how: str


def uses(plan: Plan) -> Iterator[Use]:
    """Every feature that a plan uses, pipeline by pipeline."""
    for number, pipeline in enumerate(plan.pipelines):
        yield from _of_pipeline(f"pipeline {number}", pipeline, plan.schedule)
    if plan.zero:
        for feature, what in list(zip(SHARDING, ("optimizer state", "gradients", "parameters"), strict=True))[
            : plan.zero
        ]:
            yield Use(feature=feature, where="the plan", how=f"shards {what} over replicas (ZeRO-{plan.zero})")
    if plan.zero == len(SHARDING) and len(plan.pipelines) > 1:
        how = f"shards parameters over {len(plan.pipelines)} pipelines (ZeRO-3)"
        yield Use(feature="parameter_sharding_over_pipelines", where="the plan", how=how)
    counts = {len(pipeline.micro_batches) for pipeline in plan.pipelines if pipeline.micro_batches.samples}
    if len(counts) > 1:
        how = f"runs pipelines of {', '.join(map(str, sorted(counts)))} micro-batches beside each other"
        yield Use(feature="unequal_counts", where="the plan", how=how)
    if is_asynchronous(plan):
        yield Use(feature="asynchronous", where="the plan", how=f"trains with predicted weights ({plan.schedule})")
    if len({_cuts(pipeline) for pipeline in plan.pipelines}) > 1:
        yield Use(
            feature="unlike_pipelines", where="the plan", how="cuts, orders or recomputes its pipelines differently"
        )


def _of_pipeline(where: str, pipeline: Pipeline, schedule: str) -> Iterator[Use]:
    count, stages = len(pipeline.micro_batches), pipeline.stages
    if len(stages) > 1:
        yield Use(feature="several_stages", where=where, how=f"cuts the model into {len(stages)} stages")
    if count != 1:
        yield Use(feature="several_micro_batches", where=where, how=f"has {count} micro-batches")
    if _turns_early(pipeline, schedule):
        yield Use(
            feature="early_backward", where=where, how="begins backwards of its last stage before all its forwards"
        )
    if _splits_backward(pipeline, schedule):
        yield Use(feature="split_backward", where=where, how="runs the two halves of the backward apart")
    for index, stage in enumerate(stages):
        at = f"{where}, stage {index}"
        yield from _of_stage(at, stage)
        empty = _without_samples(pipeline, stage)
        if empty:
            yield Use(
                feature="empty_share", where=at, how=f"leaves {', '.join(empty)} without a sample of a micro-batch"
            )


def _splits_backward(pipeline: Pipeline, schedule: str) -> bool:
    try:
        return any(action.kind == "W" for order in orders_of(schedule, pipeline) for action in order)
    except PlanError:
        return False  # which rule the order breaks is said by `plan.check`


def _turns_early(pipeline: Pipeline, schedule: str) -> bool:
    last = len(pipeline.stages) - 1
    try:
        own = [action.kind for order in orders_of(schedule, pipeline) for action in order if action.stage == last]
    except PlanError:
        return False  # which rule the order breaks is said by `plan.check`
    kinds = [kind for kind in own if kind in ("F", "B", "I")]
    return "F" in kinds[kinds.count("F") :]


def _of_stage(where: str, stage: Stage) -> Iterator[Use]:
    inner = [region.layout.axes[stage.batch_axes :] for region in stage.regions] if stage.sharded else []
    kinds = {axis.kind for axes in inner for axis in axes}
    if "split" in kinds:
        yield Use(feature="tensor_parallel", where=where, how=f"splits weights over {len(stage.devices)} devices")
    if "context" in kinds:
        yield Use(feature="context_parallel", where=where, how=f"splits sequences over {len(stage.devices)} devices")
    rows = count_of(stage.regions[0].layout.axes[: stage.batch_axes]) if inner else 1
    if rows > 1:
        yield Use(
            feature="rows_of_parts", where=where, how=f"has {rows} rows, each of which holds all weights in parts"
        )
    if inner and len(stage.of_row.regions[0].layout.axes) > 1:
        shown = ", ".join(f"{region.task_graph!r} {region.layout}" for region in stage.regions)
        yield Use(feature="cuts_along_two_axes", where=where, how=f"cuts tensors along several axes ({shown})")
    if stage.recompute:
        yield Use(feature="recompute", where=where, how=f"recomputes {len(stage.recompute)} blocks")
    if stage.recompute and stage.keep:
        yield Use(
            feature="selective_recompute", where=where, how=f"keeps {', '.join(stage.keep)} of what it recomputes"
        )
    if stage.offload_activations:
        how = f"keeps activations of {len(stage.offload_activations)} blocks in host memory"
        yield Use(feature="activation_offload", where=where, how=how)
    if stage.overlap:
        yield Use(feature="overlap", where=where, how="has 'overlap', which cuts each micro-batch into two halves")
    if stage.offload:
        yield Use(feature="offload", where=where, how="keeps optimizer state in host memory")
    if stage.overlap and (stage.recompute or stage.offload_activations):
        how = "recomputes" if stage.recompute else "offloads activations"
        yield Use(feature="overlap_with_recompute", where=where, how=f"has 'overlap' and {how}")


def _without_samples(pipeline: Pipeline, stage: Stage) -> list[str]:
    if not has_shares(stage):
        return []
    by_samples = all(axis.kind == "replicate" for axis in stage.layout.axes)
    taken = stage.slices if by_samples else stage.worked_on
    own = [[n for _, n in taken(size)] for size in set(pipeline.micro_batches.sizes)]
    return [device for at, device in enumerate(stage.devices) if not all(row[at] for row in own)]


def has_shares(stage: Stage) -> bool:
    """Return whether the shares of a stage can be asked for; if not, `plan.check` says what is wrong with it."""
    return any(
        region.task_graph == "*"
        and count_of(region.layout.axes) == len(stage.devices)
        and all(sum(axis.shares) for axis in region.layout.axes)
        for region in stage.regions
    )


def _cuts(pipeline: Pipeline) -> tuple[object, ...]:
    return (
        tuple((stage.ops, stage.recompute, stage.keep, stage.offload_activations) for stage in pipeline.stages),
        pipeline.place_of_stage,
        pipeline.order,
    )


def table() -> str:
    """The table in Markdown: a row a feature, a column a trait."""
    head = "| | " + " | ".join(trait.name for trait in TRAITS) + " |\n"
    rule = "|---|" + "---|" * len(TRAITS) + "\n"
    always = TRAITS[0].refuses
    rows = (
        f"| {words.name} | "
        + " | ".join("no" if feature in trait.refuses | always else "yes" for trait in TRAITS)
        + " |\n"
        for feature, words in FEATURES.items()
    )
    return head + rule + "".join(rows)
