"""What a Lightning script asks for that no plan can honour, with what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from heterodyne.errors import DataError, HeterodyneError

__all__ = ["require_even_batches", "require_honoured"]

_STEP = "the plan runs backward, clipping and update: use on_train_batch_end, gradient_clip_val, or hd.distribute"
_OVERRIDDEN = dict.fromkeys(
    ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "on_before_backward"), _STEP
) | dict.fromkeys(
    ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    "no rank has the gradients of the whole model there",
)
_PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16"}


def require_honoured(trainer: Any, module: Any, optimizers: Sequence[Optimizer]) -> str:
    """The precision in our words. Raises HeterodyneError with all that no plan would run."""
    wrong = list(_of(trainer, module, optimizers))
    if wrong:
        raise HeterodyneError("\n  ".join(["HeterodyneStrategy cannot honour", *wrong]))
    return _PRECISIONS[str(trainer.precision)]


def _of(trainer: Any, module: Any, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    if not module.automatic_optimization:
        yield "automatic_optimization=False: the plan runs backward and update; let training_step return the loss, or use hd.distribute"
    if len(optimizers) != 1:
        yield f"{len(optimizers)} optimizers: return one from configure_optimizers, with parameter groups if rates differ"
    else:
        yield from _of_optimizer(module, optimizers[0])
    for owner in (module, *trainer.callbacks):
        for name, why in _OVERRIDDEN.items():
            found = getattr(type(owner), name, None)
            if found is not None and not _is_of_lightning(found):
                yield f"{type(owner).__name__} overrides {name}: {why}"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield "training_step takes dataloader_iter: let it take the batch"
    if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
        yield "GradientAccumulationScheduler: a plan is for one global batch size; pass accumulate_grad_batches=, a number"
    algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
    if trainer.gradient_clip_val and algorithm not in (None, "norm"):
        yield f"gradient_clip_algorithm={algorithm}: gradients are clipped by their global norm; leave it out"
    if str(trainer.precision) not in _PRECISIONS:
        yield f"precision={trainer.precision}: it is none of {', '.join(_PRECISIONS)}"


def _of_optimizer(module: Any, optimizer: Optimizer) -> Iterator[str]:
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in updated]
    if left:
        yield f"the optimizer lacks {', '.join(left[:5])}: add them, or freeze them with requires_grad_(False)"


def _is_of_lightning(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in ("lightning", "pytorch_lightning")


def require_even_batches(trainer: Any) -> None:
    """Raises DataError if an epoch ends with a smaller batch than the others, as far as that can be known before it begins."""
    loader, steps, number = trainer.train_dataloader, trainer.num_training_batches, trainer.accumulate_grad_batches
    if (
        isinstance(loader, DataLoader)
        and loader.batch_size
        and not loader.drop_last
        and hasattr(loader.dataset, "__len__")
    ):
        rest = len(loader.dataset) % loader.batch_size
        if rest and steps >= len(loader):
            raise DataError(
                f"the last batch of an epoch has {rest} samples, the others {loader.batch_size}, and a plan is for one size: write "
                "DataLoader(..., drop_last=True), or take a batch size that divides the dataset"
            )
    if isinstance(steps, int) and steps % number:
        raise DataError(
            f"an epoch has {steps} batches, of which {number} make a step, so its last step would be smaller: write "
            f"limit_train_batches={steps - steps % number}, or a batch size {number} times as large without accumulate_grad_batches"
        )
