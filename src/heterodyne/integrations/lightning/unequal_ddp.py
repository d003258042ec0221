"""Lightning's own DDP strategy on devices of unlike speed: eagerly, with unequal shares of the same global batch.

The model is replicated as `hd.DistributedDataParallel`, and loaders deal each rank its share of every global batch, in training, validation
and tests. All else is Lightning's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data import DistributedSampler as EqualSampler
from torchmetrics import Metric

from heterodyne.drop_in import DistributedDataParallel
from heterodyne.drop_in.batch_groups import BatchGroups
from heterodyne.drop_in.batch_norm import leave_batch_norms
from heterodyne.drop_in.loader import DealtLoader, require_batches
from heterodyne.drop_in.loss_weight import LossCount, count_of, samples_in
from heterodyne.drop_in.sampler import Dealt, parts_of, require_shares
from heterodyne.errors import DataError, HeterodyneError
from heterodyne.runtime.comm.communicator import Communicator

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = object

__all__ = ["Replica", "UnequalDDP"]

_REFUSED = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
_LOADERS = "heterodyne_loaders"  # where a checkpoint has them; Lightning alone wants none where its own would be
_NOTHING = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}


class Replica(DistributedDataParallel):
    """A LightningModule on this rank."""

    can_repeat_forward = False  # it is training_step, which logs, counts and updates


class UnequalDDP(DDPStrategy):
    """What Lightning's `DDPStrategy` is with unequal shares; made one by inheriting from that of the package whose Trainer it is for.

    Args:
        arguments, options: Lightning's. Communication hooks and model averaging are refused.
        shares: of each rank, by hand, in any unit. None: by the ranks' own pace.
        loss_count: what the loss of a rank divides by, as for `hd.DistributedDataParallel`; a function gets the batch, and ``"tokens"`` are
            those of ``batch["labels"]``. None: samples.

    Raises HeterodyneError for what cannot be honoured, with what to do about it.
    """

    def __init__(
        self,
        *arguments: Any,
        shares: Sequence[float] | None = None,
        loss_count: LossCount | None = None,
        **options: Any,
    ) -> None:
        wrong = [name for name in _REFUSED if options.get(name) is not None]
        if wrong:
            raise HeterodyneError(
                f"{', '.join(wrong)}: these average gradients or weights as if all ranks had as many samples; leave them out"
            )
        super().__init__(*arguments, **options)
        if loss_count is not None:
            count_of(loss_count, lambda labels: labels)  # a word that is not known is told before anything is made
        self._shares, self._loss_count = shares, loss_count
        self._communicator: Communicator | None = None
        self._dealers: list[BatchGroups] = []
        self._told: list[Dealt] = []  # of what loaders have handed out since the last batch
        self._dealt: Dealt | None = None  # of the batch that is in work

    # The model

    def setup(self, trainer: Any) -> None:
        """Prepare the model as Lightning does. Collective."""
        self._layer_sync = None  # a replica takes the statistics of BatchNorm over all ranks by itself
        if self._shares is not None:
            require_shares(self._shares, self.world_size)
        for name in ("training_step", "validation_step", "test_step") if self.world_size > 1 else ():
            if "dataloader_iter" in inspect.signature(getattr(trainer.lightning_module, name)).parameters:
                raise HeterodyneError(
                    f"{name} takes dataloader_iter, so nobody knows the samples of a batch before it runs: let it take the batch"
                )
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> Any:
        return self._replica(model) if self.world_size > 1 else model  # one rank has nothing to average

    def _replica(self, model: nn.Module) -> Replica:
        count = _of_batch(self._loss_count)
        replica = Replica(model, device_ids=self.determine_ddp_device_ids(), loss_count=count, **self._ddp_kwargs)
        for dealer in self._dealers:
            replica.follow_samplers(dealer, replica)
        return replica

    def _register_ddp_hooks(self) -> None:
        """Register none: a replica reduces by its own."""

    def teardown(self) -> None:
        """Leave the model as it was made."""
        if self.lightning_module is not None:
            leave_batch_norms(self.lightning_module)
        self._dealers.clear()
        super().teardown()

    # The batches

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers that Lightning makes have all samples, which loaders deal by shares. Predictions are dealt equally, by Lightning."""
        return super().distributed_sampler_kwargs if self._trainer.predicting else {"num_replicas": 1, "rank": 0}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make a loader that deals each rank its share of every global batch, which has ``batch_size`` times the ranks. Collective.

        Streams, and samplers of one's own under ``use_distributed_sampler=False``, give each rank batches of its own, as under DDP.
        """
        loader: Any = super().process_dataloader(dataloader)
        sampler = getattr(loader, "sampler", None)
        own = not (isinstance(sampler, EqualSampler) or self._trainer._accelerator_connector.use_distributed_sampler)
        stream = not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
        if self.world_size == 1 or own or stream or self._trainer.predicting:
            return loader
        require_batches(loader)
        batches = loader.batch_sampler
        if isinstance(sampler, EqualSampler) and sampler.num_replicas > 1 and type(batches) is BatchSampler:
            whole: Any = EqualSampler(sampler.dataset, 1, 0, sampler.shuffle, sampler.seed, sampler.drop_last)
            batches = BatchSampler(whole, batches.batch_size, batches.drop_last)
        if self._communicator is None:
            self._communicator = Communicator(
                rank=self.global_rank, world_size=self.world_size, device=torch.device("cpu")
            )
        dealer = BatchGroups(batches, self.world_size, self._communicator, self._shares)
        if self._dealers and self._shares is None:
            dealer.shares = tuple(self._dealers[-1].state_dict()["shares"])
        self._dealers.append(dealer)
        if isinstance(self.model, Replica):
            self.model.follow_samplers(dealer, self.model)
        return DealtLoader(loader, dealer, [self])

    def deal(self, dealt: Dealt | None) -> None:
        """Called by a loader: whose samples it hands out next."""
        self._told += [dealt] if dealt is not None else []

    def batch_to_device(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        """Move a batch as Lightning does, and let the model know what was dealt of it."""
        told, self._told = [*parts_of(batch), *self._told], []
        self._dealt = told[0] if told else None
        sizes = sorted({dealt.total for dealt in parts_of(batch)})
        if len(sizes) > 1:
            raise DataError(
                f"several loaders make a batch, and their global batches have {' and '.join(map(str, sizes))} samples, so the loss has no "
                "one weight: give them one batch size and drop_last=True, or make one dataset of both"
            )
        if isinstance(self.model, Replica):
            self.model.deal(self._dealt)
        return super().batch_to_device(batch, *arguments, **options)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._counted():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._counted():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._counted():
            return super().test_step(*args, **kwargs)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Leave metrics and what is logged of an epoch as they were, if the one sample that this rank has only keeps it in step."""
        if self._samples != 0:
            yield
            return
        before = {id(metric): metric._copy_state_dict() for metric in self._metrics()}
        yield
        for metric in self._metrics():
            for name, value in before.get(id(metric), metric._defaults).items():
                now = getattr(metric, name)  # of the step's dtype, which all ranks have
                setattr(metric, name, value.to(now) if isinstance(now, Tensor) else list(value))

    def _metrics(self) -> list[Any]:
        logged = [each for each in (self._results or {}).values() if each.is_tensor]
        return [*(each for each in self._trainer.lightning_module.modules() if isinstance(each, Metric)), *logged]

    # What ranks tell each other

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does; while a batch is in work the mean is over its samples, and a rank without any counts nothing."""
        if not isinstance(tensor, Tensor) or not isinstance(reduce_op, str):
            return super().reduce(tensor, group, reduce_op)
        if not tensor.is_floating_point() and reduce_op.lower() in ("mean", "avg"):
            tensor = tensor.float()  # samples of an epoch, whose mean is no whole number
        samples = self._samples
        if samples is None:
            return super().reduce(tensor, group, reduce_op)
        if reduce_op.lower() not in ("mean", "avg"):
            tensor = tensor if samples else torch.full_like(tensor, _NOTHING[reduce_op.lower()])
            return super().reduce(tensor, group, reduce_op)
        values = tensor if tensor.dtype == torch.float64 else tensor.float()
        weighted = values * samples if samples else torch.zeros_like(values)
        sums = super().reduce(torch.cat([weighted.view(-1), weighted.new_tensor([samples])]), group, "sum")
        return (sums[:-1] / sums[-1]).view_as(tensor).to(tensor.dtype)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all ranks as Lightning does. Raise HeterodyneError, on every rank, if their sizes differ."""
        if self.world_size > 1 and tensor.dim():
            sizes = super().all_gather(torch.tensor(len(tensor), device=tensor.device), group).tolist()
            if len(set(sizes)) > 1:
                raise HeterodyneError(
                    f"all_gather stacks tensors of one size, and those of the ranks have {', '.join(map(str, sizes))} samples: use "
                    "self.trainer.strategy.gather(tensor), which joins them along their first dimension"
                )
        return super().all_gather(tensor, group, sync_grads)

    def gather(self, tensor: Tensor) -> Tensor:
        """Join the tensors of all ranks, ``[samples, ...]``, in the order of the global batch, each sample once. Collective.

        In training gradients flow back to the rank that each row is from, as by `hd.DistributedDataParallel.all_gather`.
        """
        if self.world_size == 1:
            return tensor
        if isinstance(self.model, Replica):
            self.model.deal(
                None if self._samples is None else self._dealt
            )  # behind a batch what was kept belongs to the epoch
            return self.model.all_gather(tensor)
        own = tensor[:0] if self._samples == 0 else tensor
        sizes = super().all_gather(torch.tensor(len(own), device=tensor.device)).tolist()
        padded = torch.cat([own, own.new_zeros(max(sizes) - len(own), *own.shape[1:])])
        parts = super().all_gather(padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:
        """Save as Lightning does; what of the epoch was trained on is where plain Lightning does not look for it."""
        if (states := _of_fit(checkpoint).pop("combined_loader", None)) is not None:
            checkpoint[_LOADERS] = states
        super().save_checkpoint(checkpoint, *arguments, **options)

    def load_checkpoint(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Load as Lightning does."""
        checkpoint = super().load_checkpoint(*arguments, **options)
        if self.world_size > 1 and _LOADERS in checkpoint:
            _of_fit(checkpoint)["combined_loader"] = checkpoint[_LOADERS]
        return checkpoint

    @property
    def _trainer(self) -> Any:
        module: Any = self.lightning_module
        return module.trainer

    @property
    def _results(self) -> Any:
        """Return what is logged in the loop that runs; None where none does."""
        return self._trainer._results if self.lightning_module is not None and self._trainer.state.fn else None

    @property
    def _samples(self) -> int | None:
        """Return how many samples this rank has of the batch that is in work; None where none is."""
        results = self._results
        if results is None or results.batch is None:
            return None
        return self._dealt.own if self._dealt is not None else samples_in(results.batch) or 1


def _of_batch(loss_count: LossCount | None) -> LossCount | None:
    """Return what counts in the arguments of a step, of which the first is the batch."""
    if not callable(loss_count) and loss_count not in ("tokens", "shifted tokens"):
        return loss_count
    count = count_of(loss_count, lambda labels=None: labels)

    def counted(batch: Any, *_: Any, **__: Any) -> float:
        named = batch if isinstance(batch, Mapping) else {}
        return count((batch,), {}) if callable(loss_count) else count((), named)

    return counted


def _of_fit(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the loop of `fit`."""
    found: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return found
