"""An even plan as a configuration file of torchtitan, by the names in its ``config/job_config.py``.

That is what its releases with TOML files read; the later ones with Python configurations call the fields the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, TypeAlias

from heterodyne.errors import PlanError
from heterodyne.plan.export.even_plan import EvenPlan
from heterodyne.plan.export.pytorch import PYTORCH_SCHEDULES, pytorch_takes
from heterodyne.plan.schedules import SCHEDULES

__all__ = ["torchtitan_toml"]

_Value: TypeAlias = "int | str | list[str] | list[list[str]]"

_PARAMETERS: Final = {"bf16": "bfloat16", "fp8": "bfloat16", "fp32": "float32"}


def torchtitan_toml(
    plan: EvenPlan, *, model: str | None = None, flavor: str | None = None, schedule_csv: str | None = None
) -> str:
    """The sections model, training, parallelism and activation_checkpoint; the rest is torchtitan's own.

    Args:
        model, flavor: as torchtitan calls them, ``llama3`` and ``8B``; left out if None.
        schedule_csv: the path of the schedule as CSV, for orders that PyTorch does not make itself (see `pytorch_takes`).

    Raises PlanError for what torchtitan cannot run.
    """
    notes = list(plan.notes)
    if plan.zero_stage == 1 and plan.dp > 1:
        notes.append("ZeRO 1 is not offered: gradients are shared out as well (ZeRO 2), which changes no result")
    sections: dict[str, Mapping[str, _Value]] = {
        "model": _model(plan, model, flavor),
        "training": _training(plan),
        "parallelism": {**_degrees(plan), **_pipeline(plan, schedule_csv)},
        "activation_checkpoint": {"mode": _recompute(plan)},
    }
    head = [f"# {plan.devices} devices, layers per stage {plan.stage_layout}", *(f"# {note}" for note in notes)]
    parts = ["\n".join((f"[{name}]", *map(_line, values.items()))) for name, values in sections.items() if values]
    return "\n\n".join(("\n".join(head), *parts)) + "\n"


def _model(plan: EvenPlan, model: str | None, flavor: str | None) -> dict[str, _Value]:
    values: dict[str, _Value] = {
        key: value for key, value in (("name", model), ("flavor", flavor)) if value is not None
    }
    return {**values, "converters": ["float8"]} if plan.precision == "fp8" else values


def _training(plan: EvenPlan) -> dict[str, _Value]:
    """Without a pipeline a step is micro-batches one by one; with one its batch is cut by `pipeline_parallel_microbatch_size`."""
    if plan.precision not in _PARAMETERS:
        raise PlanError(f"torchtitan trains in {', '.join(_PARAMETERS)}, not in {plan.precision}")
    local = plan.micro_batch_size if plan.pp == 1 else plan.micro_batch_size * plan.num_microbatches
    values: dict[str, _Value] = {"local_batch_size": local, "global_batch_size": plan.global_batch_size}
    if plan.shape.sequence_length is not None:
        values["seq_len"] = plan.shape.sequence_length
    return {**values, "mixed_precision_param": _PARAMETERS[plan.precision]}


def _degrees(plan: EvenPlan) -> dict[str, _Value]:
    sharded = plan.zero_stage > 0
    if plan.ep > 1 and not sharded:
        raise PlanError(
            f"torchtitan puts experts on devices that share out states: ep {plan.ep} needs zero_stage 1 or more, not 0"
        )
    values: dict[str, _Value] = {
        "data_parallel_replicate_degree": 1 if sharded else plan.dp,
        "data_parallel_shard_degree": plan.dp if sharded else 1,
        "tensor_parallel_degree": plan.tp,
        "pipeline_parallel_degree": plan.pp,
        "context_parallel_degree": plan.cp,
        "expert_parallel_degree": plan.ep,
        "expert_tensor_parallel_degree": 1,
    }
    if sharded:
        values["fsdp_reshard_after_forward"] = "always" if plan.zero_stage == 3 else "never"
    return values


def _pipeline(plan: EvenPlan, schedule_csv: str | None) -> dict[str, _Value]:
    """Stages by the names of their modules, as torchtitan would otherwise give the first and the last one less."""
    if plan.pp == 1:
        return {}
    values: dict[str, _Value] = {"pipeline_parallel_microbatch_size": plan.micro_batch_size}
    if schedule_csv is not None:
        values |= {
            "pipeline_parallel_schedule": "PipelineScheduleMulti",
            "pipeline_parallel_schedule_csv": schedule_csv,
        }
    elif pytorch_takes(plan):
        values["pipeline_parallel_schedule"] = plan.schedule
    elif plan.schedule in PYTORCH_SCHEDULES:
        raise PlanError(
            f"PyTorch's {plan.schedule} does not take {plan.num_microbatches} micro-batches through {plan.pp * plan.vpp} stages "
            f"on {plan.pp} places; write it as CSV and give its path as schedule_csv"
        )
    else:
        known = "; write it as CSV and give its path as schedule_csv" if plan.schedule in SCHEDULES else ""
        raise PlanError(f"PyTorch has no schedule {plan.schedule}{known}; it has {', '.join(PYTORCH_SCHEDULES)}")
    values["module_fqns_per_model_part"] = _modules(plan)
    return values


def _modules(plan: EvenPlan) -> list[list[str]]:
    stages, first = [], 0
    for layers in plan.layers_per_stage:
        stages.append([f"layers.{layer}" for layer in range(first, first + layers)])
        first += layers
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def _recompute(plan: EvenPlan) -> str:
    if not any(plan.recomputed_layers):
        return "none"
    if plan.recomputed_layers == plan.layers_per_stage:
        return "full"
    stage = next(i for i, again in enumerate(plan.recomputed_layers) if again != plan.layers_per_stage[i])
    raise PlanError(
        f"torchtitan computes all layers again or none: stage {stage} has {plan.recomputed_layers[stage]} of its "
        f"{plan.layers_per_stage[stage]}"
    )


def _line(item: tuple[str, _Value]) -> str:
    """Numbers, strings and lists of them are the same in TOML and in JSON; a list of stages has a line for each."""
    key, value = item
    if isinstance(value, list) and any(isinstance(part, list) for part in value):
        return f"{key} = [\n" + "".join(f"  {json.dumps(part)},\n" for part in value) + "]"
    return f"{key} = {json.dumps(value)}"
