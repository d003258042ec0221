"""An even plan as arguments of Megatron-LM (``pretrain_gpt.py``), by the names in its ``megatron/training/arguments.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from heterodyne.errors import PlanError
from heterodyne.plan.export.even_plan import EvenPlan
from heterodyne.plan.schedules.interleaved import round_size
from heterodyne.units import counted

__all__ = ["megatron_arguments", "megatron_layout"]

_SHARDING: Final = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_arguments(plan: EvenPlan) -> tuple[str, ...]:
    """The arguments, as words: join them with `shlex.join` for a shell. The data, the optimizer and the rest of the model are not here.

    Tensor parallelism comes with ``--sequence-parallel``, which changes no result and saves memory.

    Raises PlanError for what Megatron-LM has no argument for: a schedule, a number of micro-batches under it, or one of recomputed
    layers that differs by stage.
    """
    return tuple(str(word) for argument in _arguments(plan) for word in argument)


def megatron_layout(plan: EvenPlan) -> str:
    """For ``--pipeline-model-parallel-layout``: ``E`` the embedding, ``t`` a layer, ``L`` the loss, ``|`` between stages.

    Stages are in the order of the model, as Megatron-LM deals them out over its places: with [3, 1] on two places ``Et*3|tL``.
    """
    stages = ["t" if layers == 1 else f"t*{layers}" if layers else "" for layers in plan.layers_per_stage]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


def _arguments(plan: EvenPlan) -> Iterator[tuple[object, ...]]:
    yield "--tensor-model-parallel-size", plan.tp
    if plan.tp > 1:
        yield ("--sequence-parallel",)
    yield "--pipeline-model-parallel-size", plan.pp
    yield from _pipeline(plan)
    yield "--context-parallel-size", plan.cp
    if plan.ep > 1:
        yield "--expert-model-parallel-size", plan.ep
        yield "--expert-tensor-parallel-size", 1
    yield from _sharding(plan)
    yield "--micro-batch-size", plan.micro_batch_size
    yield "--global-batch-size", plan.global_batch_size
    yield from _recompute(plan)
    if plan.precision in ("bf16", "fp8"):
        yield ("--bf16",)
    if plan.precision == "fp16":
        yield ("--fp16",)
    if plan.precision == "fp8":
        yield "--fp8-format", "hybrid"
    yield from _model(plan)


def _pipeline(plan: EvenPlan) -> Iterator[tuple[object, ...]]:
    """Without a word on virtual stages where there is a layout, from which Megatron-LM takes their number."""
    wanted = "1F1B" if plan.vpp == 1 else "Interleaved1F1B"
    if plan.pp > 1 and plan.schedule != wanted:
        raise PlanError(
            f"Megatron-LM runs {wanted} with {counted(plan.vpp, 'stage')} on each place, not {plan.schedule}; "
            f"plan with schedule {wanted}, or take the schedule to PyTorch as CSV"
        )
    if not plan.alike_stages:
        yield "--pipeline-model-parallel-layout", megatron_layout(plan)
    elif plan.vpp > 1:
        yield "--num-virtual-stages-per-pipeline-rank", plan.vpp
    if plan.vpp > 1:
        yield from _rounds(plan)


def _rounds(plan: EvenPlan) -> Iterator[tuple[object, ...]]:
    """So many micro-batches go through a stage before the next stage of the same place. Megatron-LM takes no round, full or not, of fewer
    micro-batches than there are places.
    """
    count, size = plan.num_microbatches, round_size(plan.pp, plan.num_microbatches)
    if count < plan.pp or 0 < count % size < plan.pp:
        fit = " or ".join(str(n) for n in (count // plan.pp * plan.pp, -(-count // plan.pp) * plan.pp) if n)
        raise PlanError(
            f"Megatron-LM cannot interleave {count} micro-batches on {plan.pp} places; {fit} would do: "
            "change the global batch or the size of the micro-batches, or plan with 1F1B"
        )
    if size != plan.pp:
        yield "--microbatch-group-size-per-virtual-pipeline-stage", size


def _sharding(plan: EvenPlan) -> Iterator[tuple[object, ...]]:
    if plan.zero_stage:
        yield ("--use-distributed-optimizer",)
    if plan.zero_stage >= 2:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", _SHARDING[plan.zero_stage]
        yield ("--no-gradient-accumulation-fusion",)
        yield "--ckpt-format", "fsdp_dtensor"


def _recompute(plan: EvenPlan) -> Iterator[tuple[object, ...]]:
    again = plan.recomputed_layers
    if not any(again):
        return
    if again == plan.layers_per_stage:
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", 1
        return
    most = max(again)
    for stage, (number, layers) in enumerate(zip(again, plan.layers_per_stage, strict=True)):
        if number != min(most, layers):
            raise PlanError(
                f"Megatron-LM computes the same number of layers again in each stage: stage {stage} has {number} of its {layers}, "
                f"another one {most}"
            )
    yield "--recompute-granularity", "full"
    yield "--recompute-method", "block"
    yield "--recompute-num-layers", most


def _model(plan: EvenPlan) -> Iterator[tuple[object, ...]]:
    shape = plan.shape
    yield "--num-layers", plan.layers
    known = {
        "--hidden-size": shape.hidden_size,
        "--num-attention-heads": shape.num_attention_heads,
        "--seq-length": shape.sequence_length,
        "--max-position-embeddings": shape.sequence_length,
    }
    yield from ((name, value) for name, value in known.items() if value is not None)
    if shape.num_query_groups not in (None, shape.num_attention_heads):
        yield ("--group-query-attention",)
        yield "--num-query-groups", shape.num_query_groups
