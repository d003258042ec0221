"""Accelerate's own Accelerator on devices of unlike speed. See docs/trainer.md.

    from heterodyne.integrations.accelerate import Accelerator

Models are prepared as `hd.DistributedDataParallel`, and loaders deal each rank its share of the same global batch. All else is theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator as OfAccelerate
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.utils import DistributedType, gather_object, recursively_apply
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from heterodyne.drop_in import DistributedDataParallel
from heterodyne.drop_in.batch_groups import BatchGroups
from heterodyne.drop_in.loader import KEPT_OPTIONS
from heterodyne.drop_in.loss_weight import LossCount, count_of
from heterodyne.drop_in.sampler import Dealt, handed_out, require_shares
from heterodyne.errors import HeterodyneError
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["Accelerator"]

_REFUSED = {  # arguments of Accelerate's: what else cuts a model or its state
    **dict.fromkeys(
        ("deepspeed_plugin", "deepspeed_plugins"),
        "for sharded optimizer state use hd.ZeroRedundancyOptimizer, or hd.distribute",
    ),
    "fsdp_plugin": "a model that does not fit one device is for hd.distribute, which cuts it by what each device holds",
    "megatron_lm_plugin": "pipelines and tensor parallelism on unequal devices are for hd.distribute",
    "torch_tp_plugin": "tensor parallelism on unequal devices is for hd.distribute",
    "parallelism_config": "tensor, context and sharded data parallelism on unequal devices are for hd.distribute",
}
_NOT_BY_DATA = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP", "XLA")


class Accelerator(OfAccelerate):  # type: ignore[misc]  # Accelerate has no types
    """As `accelerate.Accelerator`, with unequal shares of the same global batch, and gradients of the mean over it.

    Args:
        arguments, options: Accelerate's. Plugins that shard the model are refused by name.
        shares: of each rank, by hand, in any unit. None: by the ranks' own pace.
        loss_count: what the loss of a rank divides by, as for `hd.DistributedDataParallel`.

    Raises HeterodyneError for what cannot be honoured, with what to do about it.
    """

    def __init__(
        self,
        *arguments: Any,
        shares: Sequence[float] | None = None,
        loss_count: LossCount | None = None,
        **options: Any,
    ) -> None:
        wrong = [f"{name}: {why}" for name, why in _REFUSED.items() if options.get(name) is not None]
        if wrong:
            raise HeterodyneError("\n  ".join(["this Accelerator deals batches by shares, and cannot take:", *wrong]))
        super().__init__(*arguments, **options)
        if any(self.distributed_type == getattr(DistributedType, name, None) for name in _NOT_BY_DATA):
            raise HeterodyneError(
                f"the configuration of accelerate launch says {self.distributed_type.value}: launch with --multi_gpu or --cpu, or with "
                "torchrun; a model that does not fit one device is for hd.distribute"
            )
        if shares is not None:
            require_shares(shares, self.num_processes)
        count_of(loss_count or "samples", lambda labels: labels)
        self._shares, self._loss_count = shares, loss_count
        self._communicator: Communicator | None = None
        self._replicas: list[DistributedDataParallel] = []
        self._dealers: list[BatchGroups] = []
        self._last: Dealt | None = None  # what was dealt last of any loader

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as Accelerate does, as a replica of `hd.DistributedDataParallel`. Collective."""
        prepared: Any = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if isinstance(prepared, DistributedDataParallel):
            if prepared not in self._replicas:  # of before `free_memory`
                self._replicas.append(prepared)
            return prepared
        trained = any(parameter.requires_grad for parameter in prepared.parameters())
        if evaluation_mode or not self.use_distributed or not trained:
            return prepared  # type: ignore[no-any-return]
        options: dict[str, Any] = {}
        if self.ddp_handler is not None:
            options = self.ddp_handler.to_kwargs()
            if str(getattr(self.ddp_handler, "comm_hook", "no")) != "no":
                raise HeterodyneError("comm_hook=...: a communication hook averages ranks, not samples: leave it out")
        if self.device.type != "cpu":
            options = {"device_ids": [self.device.index], **options}
        replica = DistributedDataParallel(prepared, loss_count=self._loss_count, **options)
        prepared._is_accelerate_prepared, replica._is_accelerate_prepared = False, True  # type: ignore[assignment]
        self._replicas.append(replica)
        for dealer in self._dealers:
            replica.follow_samplers(dealer, self._replicas[0])
        return replica

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Make a loader that deals each rank its share of every global batch. Collective.

        Streams, and what the main process reads for all (``dispatch_batches``), are dealt equally, as Accelerate does it.
        """
        ready = getattr(data_loader, "_is_accelerate_prepared", False)
        dispatched = isinstance(data_loader.dataset, IterableDataset) or self.dispatch_batches
        if dispatched and not ready and self.use_distributed:
            words = "a stream or dispatch_batches=True is dealt equally, since no rank reads samples by number"
            if self._shares is not None:
                raise HeterodyneError(f"{words}: leave shares= out, or use a map-style dataset")
            if self.is_main_process:
                sys.stderr.write(f"heterodyne: {words}; gradients are right\n")
        if ready or dispatched or not self.use_distributed:
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        alone = prepare_data_loader(  # for its own choice of a sampler
            data_loader,
            num_processes=1,
            process_index=0,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
        )
        takes_lists = isinstance(data_loader.sampler, BatchSampler)
        if self._communicator is None:
            self._communicator = Communicator(
                rank=self.process_index, world_size=self.num_processes, device=torch.device("cpu")
            )
        dealer = BatchGroups(
            alone.sampler if takes_lists else alone.batch_sampler,
            1 if self.split_batches else self.num_processes,
            self._communicator,
            self._shares,
        )
        placed = self.device_placement if device_placement is None else device_placement
        made = _Loader(
            data_loader.dataset,
            dealer,
            self._tell,
            device=self.device if placed else None,
            rng_types=[each for each in self.rng_types if each != "generator"],  # rank 0 draws the order
            _drop_last=dealer.drop_last,
            _non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
            **({"sampler": dealer, "batch_size": None} if takes_lists else {"batch_sampler": dealer}),
            **{name: getattr(data_loader, name) for name in KEPT_OPTIONS},
        )
        if self._dealers and not dealer.fixed:
            dealer.shares = tuple(self._dealers[0].state_dict()["shares"])
        self._dealers.append(dealer)
        for replica in self._replicas:
            replica.follow_samplers(dealer, self._replicas[0])
        self._dataloaders.append(made)
        return made

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing: every rank has as many batches, and no sample comes twice."""
        yield

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader behind so many global batches of its next epoch."""
        own = isinstance(dataloader, _Loader)
        return dataloader.behind(num_batches) if own else super().skip_first_batches(dataloader, num_batches)

    def forget(self, loader: Any) -> None:
        """Let go of a loader that is not read again, such as that of one evaluation."""
        if isinstance(loader, _Loader) and loader in self._dataloaders:
            self._dataloaders.remove(loader)
            self._dealers.remove(loader.dealer)
            for replica in self._replicas:
                replica.leave_sampler(loader.dealer)

    def free_memory(self, *objects: Any) -> Any:
        """Let go of what was prepared, as Accelerate does."""
        self._replicas, self._dealers = [], []
        return super().free_memory(*objects)

    def count(self, model: nn.Module, own: float | Tensor) -> AbstractContextManager[None]:
        """Say by what this rank's loss divides in the next backward, as `hd.DistributedDataParallel.count`. Collective."""
        return model.count(own) if isinstance(model, DistributedDataParallel) else nullcontext()

    @torch.no_grad()
    def mean(self, loss: Tensor | float, own: float | None = None) -> float:
        """Return the loss of the global batch from each rank's, in training or evaluation. Collective.

        Args:
            own: what this rank's loss divides by. None: its samples of the batch that was dealt last.
        """
        samples = 1 if self._last is None else self._last.own
        weight = float(own if own is not None and samples else samples)
        pair = torch.tensor([weight * float(loss) if weight else 0.0, weight], dtype=torch.float64, device=self.device)
        total, weights = self.reduce(pair, "sum").tolist()
        return float(total / weights)

    def gather(self, tensor: Any) -> Any:
        """Join the tensors of all ranks in the order of the ranks, whatever their leading sizes; that is the order of the global batch.

        What a rank without samples brings comes last, so a script may cut it off.
        """
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Join them so that each sample of the global batch is there once, to the end of the data."""
        dealt = self._dealt()
        if dealt is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            return gather_object(input_data if dealt.own else input_data[:0])
        own: Any = recursively_apply(
            lambda tensor: (tensor if tensor.dim() else tensor[None])[: None if dealt.own else 0], input_data
        )
        return self.gather(own)

    def _gathered(self, tensor: Tensor) -> Tensor:
        if not (self.use_distributed and tensor.dim()):
            return super().gather(tensor)  # type: ignore[no-any-return]
        dealt = self._dealt()
        own = torch.tensor([len(tensor), int(dealt is None or dealt.own > 0)], device=tensor.device)
        sizes = super().gather(own).view(-1, 2).tolist()
        longest = max(size for size, _ in sizes)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = super().gather(padded).split(longest) if longest else [tensor] * len(sizes)
        of_ranks = sorted(zip(parts, sizes, strict=True), key=lambda of: -of[1][1])
        return torch.cat([part[:size] for part, (size, _) in of_ranks])

    def _tell(self, dealt: Dealt | None) -> None:
        self._last = dealt or self._last
        for replica in self._replicas:
            replica.deal(dealt)

    def reads(self, dealt: Dealt | None) -> None:
        """Say which batch is trained on or gathered now, in a loop that has read further ones already."""
        self._tell(dealt)
        if isinstance(self.gradient_state.active_dataloader, _Loader):
            self.gradient_state.active_dataloader.dealt = dealt

    def _dealt(self) -> Dealt | None:
        """Return what was dealt last of the loader that is being read."""
        loader = self.gradient_state.active_dataloader
        return loader.dealt if isinstance(loader, _Loader) else None


class _Loader(DataLoaderShard):  # type: ignore[misc]
    """Accelerate's loader, which says what was dealt of each batch as it hands it out."""

    def __init__(
        self,
        dataset: Any,
        dealer: BatchGroups,
        tell: Callable[[Dealt | None], None],
        *,
        behind: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(dataset, **options)
        self.dealer, self._tell, self._behind, self._given = dealer, tell, behind, options
        self.dealt: Dealt | None = None

    def __iter__(self) -> Iterator[Any]:
        self.dealer.skips = self._behind
        return handed_out(super().__iter__(), self.dealer, self._hand_on)

    def _hand_on(self, dealt: Dealt | None) -> None:
        self.dealt = dealt or self.dealt
        self._tell(dealt)

    def __len__(self) -> int:
        return len(self.dealer) - self._behind

    @property
    def total_batch_size(self) -> int:
        """Samples of a global batch."""
        return self.dealer.global_batch_size

    def behind(self, batches: int) -> _Loader:
        """The same, behind so many batches more of each epoch."""
        made = _Loader(self.dataset, self.dealer, self._tell, behind=self._behind + batches, **self._given)
        made.iteration = self.iteration
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return what of the epoch was trained on, and the shares."""
        return self.dealer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.dealer.load_state_dict(state)
        self.iteration = state["epoch"]
