"""Trainers of Transformers on devices of unlike speed: their own loop and model, run eagerly, over unequal shares of the same global batch.

What has to be known of the loss of a rank is by what it divides: by the items of all ranks (``num_items_in_batch``), if forward or loss
have read that number; else by the rank's own labels or samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from accelerate.utils import GradientAccumulationPlugin, recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from heterodyne.drop_in import DistributedDataParallel
from heterodyne.drop_in.loss_check import evaluated, require_count
from heterodyne.drop_in.loss_weight import LossCount, count_of
from heterodyne.drop_in.sampler import dealt_of, noted
from heterodyne.integrations.accelerate import Accelerator
from heterodyne.integrations.huggingface.items import Items, LossOfSamples, countable, is_idle
from heterodyne.integrations.huggingface.refusals import require_shared
from heterodyne.runtime.checkpoint.random_state import unchanged_random_state

__all__ = ["Seq2SeqTrainer", "Trainer", "UnequalSharesMixin"]

_Base: Any = object  # what it is mixed into: a Trainer, which has no types


class UnequalSharesMixin(_Base):  # type: ignore[misc]
    """Deals the batches of a Trainer by shares: ``class MyTrainer(UnequalSharesMixin, trl.SFTTrainer)``. Arguments are that Trainer's.

    Args:
        shares: of each rank in the global batch, in any unit. None: by the ranks' own pace.
        loss_count: what the loss of a rank divides by where it does not read ``num_items_in_batch``, as for
            `hd.DistributedDataParallel`. None: by its labels that are not -100 if they are whole numbers, else by its samples.

    Raises:
        HeterodyneError: for arguments that shares cannot honour.
        VerifyError: in the first step: the loss divides by something else.
    """

    accelerator: Any
    gather_function: Any

    def __init__(
        self,
        *arguments: Any,
        shares: Sequence[float] | None = None,
        loss_count: LossCount | None = None,
        **options: Any,
    ) -> None:
        self._shares, self._loss_count = shares, loss_count
        self._loader: Any = None  # of the training
        self._resumed: tuple[Any, Iterator[Any]] | None = None  # Accelerate's iterator, and what is read in its place
        self._batch: tuple[Any, dict[str, Any], Any] = (None, {}, None)  # model, inputs and number of items
        self._checked: Any = None  # the model whose loss has been compared with that of its parts
        self._reads_items: bool | None = None  # asked once, where compiled code takes no number that notes it
        self._window: Tensor | float = 0.0  # this rank's part of the loss since the last update
        super().__init__(*arguments, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator that deals by shares out of the Trainer's own."""
        require_shared(self)
        super().create_accelerator_and_postprocess()
        theirs = self.accelerator
        self.accelerator = _Accelerator(
            before_backward=self._weigh,
            shares=self._shares,
            loss_count="samples",
            mixed_precision=theirs.mixed_precision,
            dataloader_config=theirs.dataloader_config,
            gradient_accumulation_plugin=GradientAccumulationPlugin(**theirs.gradient_state.plugin_kwargs),
            kwargs_handlers=[theirs.ddp_handler] if theirs.ddp_handler else None,
            dynamo_plugin=theirs.state.dynamo_plugin,
        )
        self._gather_each_sample_once()

    def _gather_each_sample_once(self) -> None:
        gather = self.accelerator.gather_for_metrics
        self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def explain(self) -> str:
        """Return how many samples a step has, and how many of them each rank takes now."""
        if self._loader is None:
            return "samples are dealt by shares once several ranks train on a dataset that has a length"
        dealer = self._loader.dealer
        counts = ", ".join(map(str, dealer.deal(dealer.global_batch_size)))
        how = "as they were given" if dealer.fixed else "by the ranks' own pace"
        return f"{dealer.global_batch_size} samples a step are dealt as {counts}, {how}"

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader that deals each rank its share of every global batch."""
        if isinstance(self.model_wrapped, DistributedDataParallel):  # by an earlier train()
            self.accelerator.prepare_model(self.model_wrapped)
        loader: Any = super().get_train_dataloader()
        if hasattr(loader, "dealer"):
            self._loader, self._resumed = loader, None
            if self.is_world_process_zero():
                sys.stderr.write(f"heterodyne: {self.explain()}\n")
        return loader  # type: ignore[no-any-return]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the next batches and their number of items, as the Trainer does."""
        if self._resumed is None and self._loader is not None:
            self._resumed = (epoch_iterator, self._rest_of_epoch() or epoch_iterator)
        if self._resumed is not None and epoch_iterator is self._resumed[0]:
            epoch_iterator = self._resumed[1]
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _rest_of_epoch(self) -> Iterator[Any] | None:
        """Return the batches behind a checkpoint, for the loader that Accelerate makes of them does not say what it deals."""
        accumulated = self.args.gradient_accumulation_steps
        epoch, steps = divmod(self.state.global_step, max(1, -(-len(self._loader) // accumulated)))
        if not steps or self.args.ignore_data_skip or self.callback_handler.train_dataloader is not self._loader:
            return None
        rest: Any = self.accelerator.skip_first_batches(self._loader, steps * accumulated)
        rest.set_epoch(epoch)
        iterator: Iterator[Any] = iter(rest)
        return iterator

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of items on all ranks; it notes whether the loss reads it."""
        with self._items_of_all():
            own = super()._get_num_items_in_batch([countable(each) for each in batch_samples], device)
        if own is None or not self.accelerator.use_distributed:
            return own
        items = self.accelerator.reduce(torch.as_tensor(own, device=device), "sum")
        items = items if self.args.torch_compile else items.as_subclass(Items)
        self._batch = (*self._batch[:2], items)
        return items

    @contextmanager
    def _items_of_all(self) -> Iterator[None]:
        """Let the loss divide by the items of all ranks, without the factor that makes up for DDP's mean."""
        asked, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = asked

    def _prepare_inputs(self, inputs: Any) -> Any:
        return noted(super()._prepare_inputs(inputs), dealt_of(inputs))

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Train on a micro-batch. The loss that is returned for the last one before an update is that of all ranks since the last."""
        if not isinstance(model, DistributedDataParallel):
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        self.accelerator.reads(dealt_of(inputs))
        self._batch = (model, dict(inputs), num_items_in_batch)
        with self._items_of_all():
            loss = super().training_step(model, inputs, num_items_in_batch).float()
        self._window = self._window + (loss * model.loss_weight if model.loss_weight else torch.zeros_like(loss))
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)
        whole: Tensor = self.accelerator.reduce(self._window, "sum")
        self._window = 0.0
        return whole

    def prediction_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        """Evaluate a batch, and return the loss of the global one."""
        if not self.accelerator.use_distributed:
            return super().prediction_step(model, inputs, *arguments, **options)
        self._batch = (model, dict(inputs), None)
        with self._items_of_all():
            loss, *outputs = super().prediction_step(model, inputs, *arguments, **options)
        if loss is not None:
            own, total = self._counted()
            weighted = loss.float() * own if own else torch.zeros_like(loss).float()
            losses, counts = self.accelerator.reduce(torch.stack([weighted, weighted.new_tensor(own)]), "sum")
            loss = (losses / (total or counts)).as_subclass(LossOfSamples)
            loss.dealt = dealt_of(inputs)
        return loss, *outputs

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """Evaluate, with each sample in metrics and predictions once."""
        self._gather_each_sample_once()
        try:
            return super().evaluation_loop(dataloader, *arguments, **options)
        finally:
            if not self.args.dataloader_persistent_workers:
                self.accelerator.forget(dataloader)

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        super()._track_num_input_tokens(
            {name: each[:0] for name, each in inputs.items()} if is_idle(inputs) else inputs
        )

    def _weigh(self) -> None:
        """Say to the model, between loss and backward, how much this rank's loss counts."""
        model, inputs, items = self._batch
        if not isinstance(model, DistributedDataParallel):
            return
        own, total = self._counted()
        model.count(own, total)
        word = self._loss_count or self._guess(inputs)
        own_loss = type(self).compute_loss is not transformers.Trainer.compute_loss
        if self._checked is model or self._loss_count in ("samples", "ranks"):
            return
        self._checked = model
        if own_loss:  # it may log or count, so it is not called once more
            if self._loss_count is None and total != 1 and self.is_world_process_zero():
                sys.stderr.write(
                    f"heterodyne: {type(self).__name__}.compute_loss is taken for a mean over {word}; say loss_count= of any other\n"
                )
            return
        plain, eager = None if items is None else torch.as_tensor(items).as_subclass(Tensor), self._eager(model)
        count, sums = count_of(word, model.forward), total == 1
        with unchanged_random_state():
            require_count(
                eager,
                (),
                inputs,
                count,
                words="num_items_in_batch" if sums else str(word),
                sums=sums,
                forward=lambda **part: self.compute_loss(eager, part, num_items_in_batch=plain),
            )

    def _counted(self) -> tuple[float, float | None]:
        """Return what this rank's loss divides by, and what those of all together, if that is known without asking them."""
        model, inputs, _ = self._batch
        dealt, word = dealt_of(inputs), self._loss_count or self._guess(inputs)
        if word == "ranks":
            return float(not is_idle(inputs)), self.accelerator.num_processes
        if word == "sum" or self._is_by_items():
            return float(not is_idle(inputs)), 1.0
        if word == "samples" and dealt is not None:
            return dealt.own, dealt.total
        return 0.0 if is_idle(inputs) else count_of(word, model.forward)((), inputs), None

    def _is_by_items(self) -> bool:
        model, inputs, items = self._batch
        if items is None or isinstance(items, Items):
            return items is not None and items.is_read
        if self._reads_items is None:
            noting, eager = torch.as_tensor(items).as_subclass(Items), self._eager(model)
            with unchanged_random_state(), evaluated(eager):
                self.compute_loss(eager, dict(inputs), num_items_in_batch=noting)
            self._reads_items = noting.is_read
        return self._reads_items

    def _eager(self, model: Any) -> Any:
        unwrapped = self.accelerator.unwrap_model(model)
        return getattr(unwrapped, "_orig_mod", unwrapped)  # not compiled

    def _guess(self, inputs: Mapping[str, Any]) -> LossCount:
        """Return what a loss of Transformers divides by where it is given no number of items."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return "samples"
        causal = type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return "shifted tokens" if causal or getattr(self, "_loss_shifts_labels", False) else "tokens"


class Trainer(UnequalSharesMixin, transformers.Trainer):
    """As `transformers.Trainer`, on unequal shares of the same global batch."""


class Seq2SeqTrainer(UnequalSharesMixin, transformers.Seq2SeqTrainer):
    """As `transformers.Seq2SeqTrainer`, on unequal shares of the same global batch."""


class _Accelerator(Accelerator):
    """An Accelerator that tells when a loss is there, before its gradients."""

    def __init__(self, *, before_backward: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._before_backward = before_backward

    def backward(self, loss: Tensor, **options: Any) -> None:
        self._before_backward()
        super().backward(loss, **options)

    def gather(self, tensor: Any) -> Any:
        """Join the tensors of all ranks, without those of samples that only keep a rank in step."""
        dealt = self._dealt()
        nothing = dealt is not None and not dealt.own
        own = recursively_apply(lambda each: each[:0] if each.dim() else each, tensor) if nothing else tensor
        return super().gather(own)
