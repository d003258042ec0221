"""A script's own DataLoader, made to deal each rank its share of every global batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset
from torch.utils.data import DistributedSampler as EqualSampler

from heterodyne.drop_in.data_parallel import DistributedDataParallel
from heterodyne.drop_in.sampler import Dealt, DistributedSampler, handed_out, require_shares
from heterodyne.drop_in.streams import StreamDealer
from heterodyne.errors import HeterodyneError
from heterodyne.runtime.checkpoint.random_state import unchanged_random_state
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["KEPT_OPTIONS", "DealtLoader", "prepare_loader", "require_batches"]

KEPT_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


class _Told(Protocol):
    def deal(self, dealt: Dealt | None) -> None: ...


class DealtLoader(DataLoader[Any]):
    """The loader of a script with the batches of ``sampler``; it tells ``models`` what was dealt of each as it hands it out."""

    def __init__(self, loader: DataLoader[Any], sampler: DistributedSampler, models: Sequence[_Told]) -> None:
        options = {name: getattr(loader, name) for name in KEPT_OPTIONS}
        super().__init__(loader.dataset, batch_sampler=sampler, **options)
        object.__setattr__(
            self, "sampler", sampler
        )  # scripts call loader.sampler.set_epoch(epoch); DataLoader refuses a plain assignment
        self._models, self._dealer = tuple(models), sampler
        sampler.read_ahead()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # an iterator, as every loader's
        return handed_out(self._drawn(), self._dealer, self._tell)

    def _drawn(self) -> Iterator[Any]:
        yield from self._begun()  # workers begin with the first batch, not before

    def _begun(self) -> Iterator[Any]:
        """Begin an iteration. Worker processes that are forked here do not collect garbage of this one: process groups that have ended
        crash if they are destroyed in a process without their threads.
        """
        gc.freeze()
        try:
            return super().__iter__()
        finally:
            gc.unfreeze()

    def _tell(self, dealt: Dealt | None) -> None:
        for model in self._models:
            model.deal(dealt)

    def state_dict(self) -> dict[str, Any]:
        """Return what of the epoch was trained on, and the shares."""
        return self._dealer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: the next epoch begins behind what was trained on."""
        self._dealer.load_state_dict(state)


class _StreamLoader(DealtLoader):
    """Hands out this rank's batches of a stream."""

    def __init__(
        self, loader: DataLoader[Any], dealer: StreamDealer, models: Sequence[DistributedDataParallel]
    ) -> None:
        options = {name: getattr(loader, name) for name in KEPT_OPTIONS} | {"collate_fn": _unchanged}
        DataLoader.__init__(self, dealer.batches_of_rank, batch_size=None, **options)
        self._models, self._dealer, self._stream = tuple(models), dealer, dealer

    def _drawn(self) -> Iterator[Any]:
        self._stream.begin()
        for made, batch in self._begun():
            self._stream.note(made)
            yield batch

    def __len__(self) -> int:
        return len(self._dealer)


def _unchanged(batch: Any) -> Any:
    return batch


def _dealt_stream(
    loader: DataLoader[Any], models: Sequence[DistributedDataParallel], shares: Sequence[float] | None
) -> DataLoader[Any]:
    """Make a loader that deals the samples of a stream. Raises HeterodyneError for one whose dataset makes the batches."""
    if loader.batch_size is None:
        raise _refusal(
            "its dataset makes the batches (batch_size=None), which cannot be cut: let it yield samples; or leave prepare_loader out, "
            "and let each rank take batches of a size of its own: hd.DistributedDataParallel weights them by their samples"
        )
    assert isinstance(loader.dataset, IterableDataset)
    dealer = StreamDealer(
        loader.dataset,
        models[0].communicator,
        batch_size=loader.batch_size,
        drop_last=bool(loader.drop_last),
        collate=loader.collate_fn,
        workers=loader.num_workers,
        prefetched=loader.prefetch_factor or 0,
        shares=shares,
    )
    for model in models:
        model.follow_samplers(dealer, models[0])
    return _StreamLoader(loader, dealer, models)


def prepare_loader(
    loader: DataLoader[Any], *models: DistributedDataParallel, shares: Sequence[float] | None = None
) -> DataLoader[Any]:
    """Make a DataLoader that deals each rank its share of every global batch of ``loader``: batch size times ranks.

    Args:
        loader: Its sampler is PyTorch's or our DistributedSampler, whose ``set_epoch`` goes on to decide the order; or any other, of which
            rank 0's order is taken for all. An IterableDataset yields the same samples on every rank, of which each collates its own.
        models: what is trained on its batches. The shares follow from their own pace: the first after some steps, others when it changes.
        shares: of each rank, by hand; they stay as they are.

    Raises HeterodyneError for a loader that cannot be dealt, with what to do about it.
    """
    if not models or not all(isinstance(model, DistributedDataParallel) for model in models):
        raise HeterodyneError(
            "prepare_loader(loader, model): name the models that are trained on its batches, each an hd.DistributedDataParallel; shares "
            "follow from their pace"
        )
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return _dealt_stream(loader, models, shares)
    _require_dealable(loader)
    given: Any = loader.batch_sampler if isinstance(loader.batch_sampler, DistributedSampler) else loader.sampler
    communicator = models[0].communicator
    own: DistributedSampler
    if isinstance(given, DistributedSampler):
        own = given
        own.batch_size = own.batch_size or loader.batch_size
        own.drop_last = own.drop_last or bool(loader.drop_last)
        if shares is not None:
            own.shares, own.fixed = require_shares(shares, own.num_replicas), True
    else:
        equal = isinstance(given, EqualSampler)
        dataset: Any = loader.dataset if equal or isinstance(given, SequentialSampler) else given
        own = DistributedSampler(
            range(len(dataset)),
            communicator.world_size,
            communicator.rank,
            shuffle=equal and given.shuffle,
            seed=given.seed if equal else 0,
            drop_last=bool(loader.drop_last),
            batch_size=loader.batch_size,
            shares=shares,
        )
        if equal:
            own.follow_epoch_of(given)
            own.samples = given.total_size if given.drop_last else own.samples
        elif not isinstance(given, SequentialSampler):
            _require_same_samples(given, communicator)
            own.order = lambda: communicator.broadcast_object(list(given) if communicator.rank == 0 else [], 0)
            own.can_resume = False
    _require_same_part(loader.dataset, communicator)
    sizes = communicator.all_gather_object((len(own.dataset), own.global_batch_size, own.shares))
    if any(each != sizes[0] for each in sizes):
        lines = [
            f"rank {rank}: {size:,} samples, {batch} a step, shares {s}" for rank, (size, batch, s) in enumerate(sizes)
        ]
        raise HeterodyneError(
            "\n  ".join(["the ranks have different loaders; make the same one on every rank:", *lines])
        )
    for model in models:
        model.follow_samplers(own, models[0])
    return DealtLoader(loader, own, models)


def _require_same_samples(sampler: Any, communicator: Communicator) -> None:
    """Raise HeterodyneError, on every rank, where samplers draw from parts that have nothing in common. Collective."""
    with unchanged_random_state():
        before = sampler.generator.get_state() if getattr(sampler, "generator", None) is not None else None
        own = frozenset(map(int, sampler))
        if before is not None:
            sampler.generator.set_state(before)
    if len(set(communicator.all_gather_object(hash(own)))) == 1:
        return
    drawn = communicator.all_gather_object(own)
    apart = [rank for rank, of in enumerate(drawn) if of and drawn[0].isdisjoint(of)]
    if apart:
        raise _refusal(
            f"the {type(sampler).__name__} of rank {apart[0]} has no sample of that of rank 0: give every rank a sampler of all samples, "
            "which are dealt by shares"
        )


def _require_same_part(dataset: Any, communicator: Communicator) -> None:
    """Raise HeterodyneError, on every rank, where the ranks have unlike subsets of a dataset. Collective."""
    own = list(map(int, dataset.indices)) if isinstance(dataset, Subset) else None
    of_ranks = communicator.all_gather_object(None if own is None else hash(tuple(own)))
    if any(of != of_ranks[0] for of in of_ranks):
        raise _refusal(
            "the ranks have unlike subsets of the dataset: give every rank all of it, which is dealt by shares"
        )


def _require_dealable(loader: Any) -> None:
    """Raises HeterodyneError."""
    if not isinstance(loader, DataLoader):
        raise _refusal(
            f"a {type(loader).__name__} is no DataLoader: use hd.DistributedSampler(dataset, batch_size=...) in its place"
        )
    sampler: Any = loader.sampler
    if isinstance(loader.batch_sampler, DistributedSampler) or isinstance(sampler, DistributedSampler):
        return
    require_batches(loader)
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise _refusal(
            "its batch_sampler says how many samples a batch has: make it hd.DistributedSampler(dataset, batch_size=...)"
        )
    equal = isinstance(sampler, EqualSampler)
    if equal and sampler.num_replicas != dist.get_world_size():
        raise _refusal(f"its sampler is for {sampler.num_replicas} ranks, and there are {dist.get_world_size()}")
    if equal and type(sampler).__iter__ is not EqualSampler.__iter__:
        raise _refusal(
            f"{type(sampler).__name__} has an order of its own for each rank: use a sampler of the order of all samples"
        )
    if not equal and any(hasattr(sampler, name) for name in ("num_replicas", "rank", "world_size")):
        raise _refusal(f"its {type(sampler).__name__} gives each rank samples of its own: use hd.DistributedSampler")
    if not hasattr(loader.dataset if isinstance(sampler, EqualSampler | SequentialSampler) else sampler, "__len__"):
        raise _refusal(
            "it has no length, so nobody knows which global batch is the last: give its dataset or sampler __len__"
        )


def require_batches(loader: DataLoader[Any]) -> None:
    """Raise HeterodyneError for a loader that does more than a DataLoader, or that has no batches."""
    if type(loader).__iter__ not in (DataLoader.__iter__, DealtLoader.__iter__):
        raise _refusal(
            f"{type(loader).__name__} has an __iter__ of its own, which would not run: do that in collate_fn or in the loop"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise _refusal(
            "it has no batches (batch_size=None): give it a batch size, of a rank where all have as many samples"
        )


def _refusal(words: str) -> HeterodyneError:
    return HeterodyneError(f"this loader cannot be dealt by shares: {words}")
