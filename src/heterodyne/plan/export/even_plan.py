"""An even arrangement of alike devices: what other frameworks can run, in the field's own words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from heterodyne.errors import PlanError
from heterodyne.plan.plan import Layout, Pipeline, Plan, Stage

__all__ = ["EvenPlan", "ModelShape", "Precision", "even_plan_of_groups"]

Precision: TypeAlias = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Numbers of a transformer as far as they are known; None: not known."""

    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    sequence_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvenPlan:
    """Every device in one mesh of ``dp x pp x cp x tp``, every replica the same.

    Args:
        dp, tp, pp, cp, ep: data, tensor, pipeline, context and expert parallel; the experts are whole over ``dp x cp x tp``.
        vpp: stages on each place of the pipeline.
        zero_stage: 0: all replicas hold all; 1: optimizer states are shared out; 2: gradients too; 3: weights too.
        micro_batch_size: samples of a micro-batch in each replica.
        global_batch_size: samples of a step, over all replicas.
        layers_per_stage: ``pp x vpp`` numbers in the order of the model; the embedding is with the first, the head with the last.
        recomputed_layers: for each stage how many of its layers compute their activations again; (): none.
        schedule: as in PyTorch.
        notes: what is not quite the same in the other framework, for whoever reads the export.

    Raises PlanError that lists all that does not fit together.
    """

    layers_per_stage: tuple[int, ...]
    micro_batch_size: int
    global_batch_size: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    recomputed_layers: tuple[int, ...] = ()
    schedule: str = "1F1B"
    precision: Precision = "bf16"
    shape: ModelShape = ModelShape()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        broken = [f"{name} is {getattr(self, name)}" for name in _DEGREES if getattr(self, name) < 1]
        if not broken:
            broken = list(self._broken())
        if broken:
            raise PlanError(f"not an even plan: {'; '.join(broken)}")

    def _broken(self) -> list[str]:
        broken, stages = [], self.pp * self.vpp
        if len(self.layers_per_stage) != stages:
            broken.append(f"{len(self.layers_per_stage)} stages for pp {self.pp} x vpp {self.vpp}")
        broken += [f"stage {i} has {n} layers" for i, n in enumerate(self.layers_per_stage) if n < 0]
        broken += [f"stage {i} has no layers" for i, n in enumerate(self.layers_per_stage[1:-1], start=1) if n == 0]
        if self.global_batch_size % (self.dp * self.micro_batch_size):
            broken.append(
                f"a global batch of {self.global_batch_size} is no multiple of dp {self.dp} x micro-batches of {self.micro_batch_size}"
            )
        if (self.dp * self.cp * self.tp) % self.ep:
            broken.append(f"ep {self.ep} does not divide dp {self.dp} x cp {self.cp} x tp {self.tp}")
        if self.vpp > 1 and self.pp == 1:
            broken.append(f"vpp is {self.vpp} where there is no pipeline")
        if self.recomputed_layers and len(self.recomputed_layers) != len(self.layers_per_stage):
            broken.append(f"{len(self.recomputed_layers)} recomputed_layers for {len(self.layers_per_stage)} stages")
        for stage, (again, layers) in enumerate(zip(self.recomputed_layers, self.layers_per_stage, strict=False)):
            if not 0 <= again <= layers:
                broken.append(f"stage {stage} computes {again} of its {layers} layers again")
        return broken

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def layers(self) -> int:
        return sum(self.layers_per_stage)

    @property
    def num_microbatches(self) -> int:
        """The micro-batches of each replica in a step."""
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def alike_stages(self) -> bool:
        """Return whether each stage has as many layers as any other."""
        return len(set(self.layers_per_stage)) == 1

    @property
    def stage_layout(self) -> str:
        """Layers of each stage, as ``[12, 10, 6, 4]``."""
        return str(list(self.layers_per_stage))


_DEGREES = ("dp", "tp", "pp", "vpp", "cp", "ep", "micro_batch_size", "global_batch_size")


def even_plan_of_groups(
    plan: Plan,
    *,
    precision: Precision = "bf16",
    shape: ModelShape | None = None,
) -> EvenPlan:
    """The same plan in the words of other frameworks.

    Args:
        plan: not bound. Its first and its last block are the embedding and the head, which other frameworks do not count.

    Raises PlanError with what is not even, and what would be.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    kinds = {stage.group.kind for stage in stages if stage.group}
    if len(kinds) != 1:
        raise PlanError(f"other frameworks know one kind of device, and the plan has {', '.join(sorted(kinds))}")
    widths = {_widths(stage.regions[0].layout) for stage in stages}
    if len(widths) > 1:
        told = ", ".join(_in_words(own) for own in sorted(widths))
        raise PlanError(f"its stages have widths {told}, and other frameworks have one")
    if any(not any(pipeline.micro_batches.sizes) for pipeline in plan.pipelines):
        raise PlanError("it has pipelines without samples, which hold state for others; other frameworks have none")
    shapes = {(max(p.micro_batches.sizes), _cut(p)) for p in plan.pipelines}
    if len(shapes) > 1:
        raise PlanError(f"it has {len(shapes)} kinds of pipelines, and other frameworks have one")
    (micro_batch, cut), (data, context, tensor) = next(iter(shapes)), next(iter(widths))
    counts = [len(p.micro_batches) for p in plan.pipelines]
    # Devices that share a micro-batch are replicas in other words.
    replicas = data * sum(pipeline.replicas for pipeline in plan.pipelines)
    micro_batch //= data
    if len(set(counts)) > 1 or plan.global_batch_size != micro_batch * replicas * counts[0]:
        raise PlanError(
            f"{replicas} replicas do not share {plan.global_batch_size} samples evenly in micro-batches of {micro_batch}; "
            f"a global batch of {micro_batch * replicas * max(counts)} would"
        )
    layers = [stop - start for (start, stop), _, _ in cut]
    layers[0] -= 1
    layers[-1] -= 1
    again = tuple(count if recompute else 0 for count, (_, recompute, _) in zip(layers, cut, strict=True))
    places = len({place for _, _, place in cut})
    return EvenPlan(
        layers_per_stage=tuple(layers),
        micro_batch_size=micro_batch,
        global_batch_size=plan.global_batch_size,
        dp=replicas,
        tp=tensor,
        cp=context,
        ep=max((stage.group.experts or 1 for stage in stages if stage.group), default=1),
        pp=places,
        vpp=len(cut) // places,
        zero_stage=plan.zero,
        recomputed_layers=again if any(again) else (),
        schedule=plan.schedule if len(cut) > 1 else "1F1B",
        precision=precision,
        shape=shape or ModelShape(),
    )


def _widths(layout: Layout) -> tuple[int, int, int]:
    """Members of the axes that share samples, sequences and weights."""
    found = {"replicate": 1, "context": 1, "split": 1}
    for axis in layout.axes:
        found[axis.kind] *= len(axis.shares)
    return found["replicate"], found["context"], found["split"]


def _in_words(widths: tuple[int, int, int]) -> str:
    named = zip(("data", "context", "tensor"), widths, strict=True)
    return " x ".join(f"{name} {width}" for name, width in named if width > 1) or "1"


def _cut(pipeline: Pipeline) -> tuple[tuple[tuple[int, int], bool, int], ...]:
    """Return, for each stage, its blocks, whether it recomputes, and its place."""
    return tuple(
        (
            _blocks(stage),
            bool(stage.recompute),
            number if stage.group is None or stage.group.place is None else stage.group.place,
        )
        for number, stage in enumerate(pipeline.stages)
    )


def _blocks(stage: Stage) -> tuple[int, int]:
    if stage.blocks is None:
        raise PlanError("the plan names devices and ops; this export takes one that names kinds and blocks")
    return stage.blocks
