"""The Trainer of Transformers: its loop, callbacks, logs and files as they are, its steps and evaluations by a plan.

Every rank runs the Trainer's own loop over global batches, as one process alone would. Only what touches the model is replaced, by
public methods that it documents for subclasses: the step, the optimizer, predictions, and what is saved.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, has_length

from heterodyne.api import Distributed, distribute
from heterodyne.api.options import loss_options
from heterodyne.api.session import LONGEST_PHASE_S
from heterodyne.errors import CaptureError, CheckpointError, DataError, HeterodyneError, VerifyError
from heterodyne.integrations.first_batch import first_batch, resumed
from heterodyne.integrations.huggingface.last_batch import completed, require_completable
from heterodyne.integrations.huggingface.loss_outside import ITEMS, loss_outside
from heterodyne.integrations.huggingface.optimizer import SteppedByPlan, grouped
from heterodyne.integrations.huggingface.refusals import (
    EAGERLY,
    require_arguments,
    require_honoured,
    require_optimizer,
    require_same_length,
)
from heterodyne.runtime.checkpoint.random_state import unchanged_random_state
from heterodyne.runtime.worker import StepResult

__all__ = ["HeterodyneTrainer"]

_STATE = "heterodyne"
_SAMPLES = "train_samples"
"""In a checkpoint of the Trainer: optimizer and weights as each rank holds them."""
_ARGUMENTS = "training_args.bin"


class HeterodyneTrainer(Trainer):
    """As `transformers.Trainer`, and trains on all ranks of a torchrun, or of our launcher, under one plan.

    Args:
        distribution: more arguments of `hd.distribute`, such as ``plan`` or ``measure_s``.

    Raises HeterodyneError for what no plan can honour, with what to write instead.
    """

    _of_model: ClassVar[WeakKeyDictionary[nn.Module, HeterodyneTrainer]] = (
        WeakKeyDictionary()
    )  # those that have not ended
    """The trainer that has last brought a model under a plan; scripts make several of one model."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        distribution: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._distribution = dict(distribution or {})
        self._distributed: Distributed | None = None
        self._ended = False
        self._resumed: Path | None = None
        self._last: StepResult | None = None
        super().__init__(model, require_arguments(args).of_one_process(), *positional, **options)
        require_honoured(self)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False  # the plan places model and batches

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **options: Any) -> Any:
        if self._samples == 0:
            raise DataError("train_dataset has no samples: give one that has some")
        is_open = self._distributed is not None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self._folder) or True  # type: ignore[no-untyped-call]
        self._resumed = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        if self._resumed is not None and is_open and not (self._resumed / _STATE).is_dir():
            raise CheckpointError(f"{self._resumed} holds weights alone: resume from it before anything is evaluated")
        if self.model_init is not None and is_open:
            raise HeterodyneError(
                f"model_init makes another model, and the plan is that of the first: make another trainer, {EAGERLY}"
            )
        with self._leaving_on_error():
            return super().train(resume_from_checkpoint, *positional, **options)

    def get_train_dataloader(self) -> DataLoader[Any]:
        self.train_dataset = resumed(self.train_dataset)
        return super().get_train_dataloader()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        distributed = self._opened()
        if self._resumed is not None and (self._resumed / _STATE).is_dir():
            self._load(distributed, self._resumed)
            require_same_length(distributed.extra.get(_SAMPLES), self._samples, self._resumed)
        if self.optimizer is None:
            self.optimizer = SteppedByPlan(distributed.optimizer)
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        distributed = self._opened(inputs)
        model.train()
        size, batch = _size(inputs), self._batch(inputs)
        if size < self.args.train_batch_size:
            batch = completed(batch, size, self.args.train_batch_size - size, self.label_names)
        with unchanged_random_state():
            self._last = distributed.step(batch)
        model.zero_grad()  # the Trainer has nothing left to clip
        return torch.tensor(self._last.loss)

    def log(self, logs: dict[str, float], *positional: Any, **options: Any) -> None:
        if "grad_norm" in logs:  # of no gradients, see `training_step`
            norm = None if self._last is None else self._last.grad_norm
            logs = {name: value for name, value in logs.items() if name != "grad_norm"} | (
                {} if norm is None else {"grad_norm": norm}
            )
        super().log(logs, *positional, **options)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        with self._leaving_on_error():
            distributed, batch = self._opened(inputs), self._batch(inputs)
            labels = [batch[name] for name in self.label_names if batch.get(name) is not None]
            complete = len(labels) == len(self.label_names)
            has_loss = complete if self.label_names else self.can_return_loss
            loss = torch.tensor(distributed.evaluate(batch)) if has_loss else None
            if prediction_loss_only:
                return loss, None, None
            outputs = distributed.predict(batch)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        if isinstance(outputs, Mapping):
            ignored = {*ignore_keys, "loss"} if has_loss else {*ignore_keys}
            outputs = tuple(value for name, value in outputs.items() if name not in ignored and value is not None)
        elif has_loss and isinstance(outputs, tuple) and loss_outside(self) is None:
            outputs = outputs[1:]
        given = tuple(labels) if complete and labels else None
        return loss, _only(outputs), _only(given)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._distributed is None or self._ended:
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        folder = Path(output_dir or self._folder)
        aside = self._distributed.save_pretrained(folder / f".{_STATE}-weights")
        if self.args.should_save:
            for file in aside.iterdir():
                file.replace(folder / file.name)
            shutil.rmtree(aside)
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, folder / _ARGUMENTS)
        if folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-") and self.is_in_train and not self.args.save_only_model:
            self._distributed.save_checkpoint(folder / _STATE, extra={_SAMPLES: self._samples}, keep=1)
        if self.args.push_to_hub and not _internal_call:
            with self.phase("pushing to the hub"):
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def phase(self, words: str, limit_s: float = LONGEST_PHASE_S) -> AbstractContextManager[Any]:
        """Around long work of one rank (a callback that uploads), as `Distributed.phase`."""
        return nullcontext() if self._distributed is None else self._distributed.phase(words, limit_s)

    def end(self) -> None:
        """Bring the weights back into the model on every rank and part from the others. Else it is done when the script ends."""
        self._leave(None)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # equal on every rank, one file
            super()._save_rng_state(output_dir)

    def _load_best_model(self) -> None:
        self._load(self._opened(), Path(str(self.state.best_model_checkpoint)))

    def _load(self, distributed: Distributed, checkpoint: Path) -> None:
        with unchanged_random_state():  # the Trainer brings back its own
            found = distributed.load_checkpoint(checkpoint / _STATE) if (checkpoint / _STATE).is_dir() else None
        if found is None:
            raise CheckpointError(
                f"{checkpoint / _STATE} holds no whole checkpoint: was it written by a plain Trainer?"
            )

    def _opened(self, example: Mapping[str, Any] | None = None) -> Distributed:
        """The model under its plan, made when it is first needed. Collective."""
        if self._ended:
            raise HeterodyneError("the trainer has ended, and its ranks have parted: make another one")
        if self._distributed is None:
            with unchanged_random_state():
                if self.train_dataset is not None:
                    example, _ = first_batch(self.get_train_dataloader())
                elif example is None:
                    raise DataError(
                        "the plan is made from a batch, and there is no train_dataset: give the trainer one"
                    )
                batch = self._batch(example)
                self._module.train()
                self._end_of_others()
                self._distributed = self._distribute(batch)
                if told := self._distributed.explain():
                    sys.stderr.write(f"{told}\n")
                if self._has_smaller_batch():
                    labels = self.label_names
                    require_completable(self._distributed, self._module, batch, _size(batch), labels)
        return self._distributed

    def _end_of_others(self) -> None:
        """End an earlier trainer of the same model, which has it under its plan. Collective: every rank makes the same trainers."""
        earlier = self._of_model.get(self._module)
        if earlier is not None:
            earlier.end()
        self._of_model[self._module] = self

    def _batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """With the number of items, by which the Trainer lets a loss divide its sum."""
        _, items = self.get_batch_samples(iter([inputs]), 1, torch.device("cpu"))
        return {**inputs} if items is None else {**inputs, ITEMS: torch.as_tensor(items)}

    def _distribute(self, batch: Mapping[str, Any]) -> Distributed:
        args, model, told = self.args, cast(Any, self.model), loss_options(self._distribution.get("loss"))
        loss = told.function or loss_outside(self)
        withheld = ("labels",) if self.model_accepts_loss_kwargs else ("labels", ITEMS)
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(args, model)
        require_optimizer(args, kind, options)
        decayed = frozenset(self.get_decay_parameter_names(self._module))
        return distribute(
            self._module,
            batch,
            **{
                "optimizer": grouped(kind, decayed, args.weight_decay, options),
                "global_batch_size": args.train_batch_size,
                "precision": "bf16" if args.bf16 else "fp32",
                "clip_grad_norm": args.max_grad_norm or 0.0,
                "seed": args.seed,
                **self._distribution,
                "loss": replace(
                    told,
                    function=loss,
                    only=tuple(name for name in withheld if loss is not None and name in batch),
                ),
            },
        )

    @property
    def _module(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model

    @property
    def _folder(self) -> str:
        return str(self.args.output_dir)

    def _has_smaller_batch(self) -> bool:
        samples = self._samples
        return not self.args.dataloader_drop_last and samples is not None and samples % self.args.train_batch_size > 0

    @property
    def _samples(self) -> int | None:
        """The number of samples of the training data; None for a stream."""
        return len(self.train_dataset) if has_length(self.train_dataset) else None

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """The other ranks are to hear of it now, not when the script has ended."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, CaptureError | VerifyError | DataError):
                error.add_note(EAGERLY)
            self._leave(error)
            raise

    def _leave(self, error: BaseException | None) -> None:
        if self._distributed is not None and not self._ended:
            self._ended = True
            self._of_model.pop(self._module, None)
            self._distributed.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _size(batch: Mapping[str, Any]) -> int:
    return int(next(tensor.shape[0] for tensor in batch.values() if isinstance(tensor, Tensor) and tensor.dim()))


def _only(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values
