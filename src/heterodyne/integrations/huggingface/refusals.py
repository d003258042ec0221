"""What a script asks of the Trainer that no plan can honour, with what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from heterodyne.errors import CheckpointError, HeterodyneError
from heterodyne.integrations.huggingface.arguments import HeterodyneArguments
from heterodyne.runtime.checkpoint.found import OTHER_DATA

__all__ = [
    "EAGERLY",
    "require_arguments",
    "require_honoured",
    "require_optimizer",
    "require_same_length",
    "require_shared",
]

EAGERLY = "or use heterodyne.integrations.huggingface.Trainer, which runs any script eagerly with unequal shares"
_OF_MODEL = {"params", "model", "optimizer_dict"}
_SET = {
    "fsdp": "the plan says which rank holds what: leave it out",
    "deepspeed": "the plan says which rank holds what: leave it out",
    "parallelism_config": "the plan says how the model is spread: leave it out, or pass distribution={'plan': ...}",
    "torch_compile": "compiled code cannot be cut into stages or measured by blocks: leave it out",
    "fp16": "this trainer has not been tried in fp16: take bf16, or hd.distribute(precision='fp16')",
    "fp16_full_eval": "evaluation has the precision of the training: leave it out",
    "bf16_full_eval": "evaluation has the precision of the training: leave it out",
    "auto_find_batch_size": "the planner finds micro-batches that fit, the global batch stays: leave it out",
    "use_liger_kernel": "its kernels cannot be captured: leave it out",
    "neftune_noise_alpha": "its hook draws noise that would depend on the plan: leave it out",
    "save_on_each_node": "rank 0 writes the weights, each rank its part of the state: save where all ranks see it",
}
_OVERRIDDEN = {
    "compute_loss": "pass the loss as compute_loss_func=",
    "training_step": "the plan runs the step: use a callback",
    "create_optimizer": "pass optimizer_cls_and_kwargs=(class, options)",
    "create_optimizer_and_scheduler": "pass optimizer_cls_and_kwargs=(class, options), override create_scheduler",
}
_CUT = "each rank holds the whole model and takes a share of the batch; HeterodyneTrainer cuts models"


def require_shared(trainer: Any) -> None:
    """Raises HeterodyneError with all that is asked of a Trainer whose ranks have shares of the batch, and cannot be honoured."""
    args = trainer.args
    several = args.world_size > 1
    asked = {
        **{f"{name}: {_CUT}": getattr(args, name, None) for name in ("fsdp", "deepspeed", "parallelism_config")},
        f"tensor parallelism of the model: {_CUT}": (getattr(trainer.model, "tp_size", None) or 1) > 1,
        "one process for several GPUs (torch.nn.DataParallel): start the script with torchrun": args.n_gpu > 1,
        "auto_find_batch_size: each rank would find its own: set per_device_train_batch_size": several
        and args.auto_find_batch_size,
        "train_sampling_strategy='batch_rebalance': each rank has batches of its own: take 'group_by_length'": several
        and getattr(args, "train_sampling_strategy", None) == "batch_rebalance",
    }
    wrong = [words for words, is_asked in asked.items() if is_asked]
    _require_none(wrong, "a Trainer on unequal shares", "")


def require_arguments(args: TrainingArguments | None) -> HeterodyneArguments:
    """Raises HeterodyneError for stock arguments, or with all in them that cannot be honoured."""
    if args is None:
        return HeterodyneArguments(output_dir="tmp_trainer")
    if not isinstance(args, HeterodyneArguments):
        raise HeterodyneError(
            "args are transformers' own TrainingArguments, with which Accelerate connects the ranks in its way: write "
            f"'from heterodyne.integrations.huggingface import HeterodyneArguments as TrainingArguments', {EAGERLY}"
        )
    wrong = [f"{name}: {why}" for name, why in _SET.items() if getattr(args, name, None)]
    if args.load_best_model_at_end and args.save_only_model:
        wrong.append("load_best_model_at_end with save_only_model: the best model is read from a whole checkpoint")
    if args._wants_cpu and torch.accelerator.is_available():
        wrong.append("use_cpu: each rank takes the accelerator that it sees: hide them, CUDA_VISIBLE_DEVICES=''")
    _require_none(wrong)
    return args


def require_honoured(trainer: Trainer) -> None:
    """Raises HeterodyneError with all in the trainer that no plan would run."""
    own = type(trainer).__mro__[: [kind.__name__ for kind in type(trainer).__mro__].index("HeterodyneTrainer")]
    wrong = [
        f"{kind.__name__} overrides {name}: {why}"
        for kind in own
        for name, why in _OVERRIDDEN.items()
        if name in vars(kind)
    ]
    _require_none([*wrong, *_of(trainer)])


def require_optimizer(args: TrainingArguments, kind: Any, options: Mapping[str, Any]) -> None:
    """Raises HeterodyneError for one that the Trainer makes of the whole model (GaLore, LOMO, APOLLO), of which a rank may hold a part."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or _OF_MODEL & set(options):
        optim = str(getattr(args.optim, "value", args.optim))
        raise HeterodyneError(
            f"optim={optim}: it is made of the whole model, of which a rank may hold a part: take one that is made of parameters "
            f"(adamw_torch, adafactor), or pass optimizer_cls_and_kwargs=(class, options), {EAGERLY}"
        )


def _of(trainer: Any) -> Iterator[str]:
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        yield "optimizers are made already; each rank makes one of what it holds: pass optimizer_cls_and_kwargs=(class, options)"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        yield "the launcher asks for FSDP or DeepSpeed: start the script with torchrun"
    if trainer.is_model_parallel:
        yield "the model is spread by a device_map: load it without one"


def _require_none(wrong: list[str], whose: str = "HeterodyneTrainer", way_out: str = EAGERLY) -> None:
    if wrong:
        raise HeterodyneError("\n  ".join([f"{whose} cannot honour", *wrong, *([way_out] if way_out else [])]))


def require_same_length(before: int | None, now: int | None, checkpoint: Path) -> None:
    """Raises CheckpointError if the training data had another number of samples when a checkpoint was written: the Trainer finds its
    place by counting batches, which are others then. None: a stream, or not known.
    """
    if before is not None and now is not None and before != now:
        raise CheckpointError(
            f"{checkpoint} was written with a train_dataset of {before} samples, and now it has {now}; {OTHER_DATA}, or train again from "
            "the weights of the checkpoint (from_pretrained)"
        )
