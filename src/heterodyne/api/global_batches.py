"""Datasets and streams for one's own training loop, as global batches of which each rank reads its own samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from heterodyne.arguments import checked_arguments
from heterodyne.errors import CheckpointError, DataError
from heterodyne.runtime.checkpoint.checkpoints import taken_from
from heterodyne.runtime.checkpoint.found import OTHER_DATA
from heterodyne.runtime.checkpoint.manifest import differences
from heterodyne.runtime.data.dataset import DatasetSource, is_map_style
from heterodyne.runtime.data.packing import PackedRows
from heterodyne.runtime.data.padding import PadTo
from heterodyne.runtime.data.stream import StreamSource
from heterodyne.runtime.slices import BatchSource

__all__ = ["Batches", "batches"]


class Batches:
    """The global batches of a training run, one after the other. Made by `batches`."""

    def __init__(self, source: DatasetSource | StreamSource, *, epochs: int | None) -> None:
        self._source = source
        self._per_epoch = source.samples_per_epoch if isinstance(source, DatasetSource) else None
        self._last = (
            None if epochs is None or self._per_epoch is None else epochs * self._per_epoch // source.batch_size
        )
        self._step = 0

    def __iter__(self) -> Iterator[BatchSource]:
        """From where the run is; a batch counts as done when it is given."""
        while self._last is None or self._step < self._last:
            batch = self._source.batch(self._step)
            self._step += 1
            yield batch

    def __len__(self) -> int:
        """Return the number of batches of the whole run. Raises TypeError where it has no end."""
        if self._last is None:
            raise TypeError("these batches go on forever: give a number of epochs, or stop the loop by yourself")
        return self._last

    @checked_arguments
    def example(self, samples: int = 4) -> Any:
        """Return the first samples of the run, to be given to `heterodyne.distribute`: tensors by name, a tuple of them, or one."""
        source = self._source
        batch = source.batch_at(0, source.batch_size) if isinstance(source, DatasetSource) else source.batch(0)
        return batch.samples(0, min(samples, batch.size))

    def close(self) -> None:
        """End the processes that read ahead; a later batch starts them again. They end with this process in any case."""
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was given last, the same on every rank: take it when that one's step is done."""
        position = self._step * self._source.batch_size
        state: dict[str, Any] = {"steps": self._step, "identity": dict(self._source.identity)}
        if self._per_epoch is not None:
            state["epoch"], state["cursor"] = divmod(position, self._per_epoch)
        kept = self._source.state_dict()
        return state if kept is None else {**state, "stream": kept}

    @checked_arguments
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on any number of ranks. Raises CheckpointError if it is of other data, or of another seed."""
        with taken_from("it is a state of batches", "pass what state_dict() returned"):
            steps, identity, stream = int(state["steps"]), dict(state["identity"]), state.get("stream")
            if not 0 <= steps < 2**53:
                raise ValueError("a number of steps that nobody has made")
        other = differences(identity, self._source.identity)
        if other:
            raise CheckpointError(
                f"these batches were made of other data ({'; '.join(other)}); {OTHER_DATA}, and its seed"
            )
        if stream is not None:
            with taken_from("it is a state of a stream", "pass what state_dict() returned"):
                self._source.load_state_dict(stream)
        self._step = steps


@checked_arguments
def batches(
    dataset: Any,
    *,
    global_batch_size: int,
    seed: int = 0,
    epochs: int | None = None,
    shuffle: bool = True,
    collate: Callable[[list[Any]], Any] | None = None,
    pad_to: int | None = None,
    pack_to: int | None = None,
    lengths: Sequence[int] | None = None,
    balance: bool = True,
    shuffle_buffer: int = 0,
    slots: int | None = None,
    workers: int = 0,
    prefetch: int = 2,
) -> Batches:
    """Global batches of a dataset or a stream, in an order that is the same under any plan and any number of ranks.

        batches = hd.batches(dataset, global_batch_size=32, epochs=3)
        trainer = hd.distribute(model, batches.example(), global_batch_size=32)
        for batch in batches:
            trainer.step(batch)

    Every rank makes them of the same dataset. A batch hands out samples, and a rank reads its own: no DistributedSampler, and no
    DataLoader. Batches go on over the end of an epoch; what is left at the end of the last one is not used.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``, whose samples make a mapping of input names to tensors, or a tuple as
            `distribute` takes it; or a stream: an iterable that can be gone through again, or a function that makes one.
        seed: decides the order, and what the dataset draws at random for a sample.
        epochs: None: without end. A stream has no end.
        shuffle: False: in the order of the dataset. A stream is shuffled by its ``shuffle_buffer``.
        collate: makes tensors of a list of samples; torch's default if None. One that pads to the longest sample it is given pads to
            that of the global batch if there are ``lengths``. Without them it makes slices of different shapes: right where each device
            runs the whole model, with attention masks; elsewhere it is refused. What it draws at random belongs to the sample.
        pad_to: sequences are filled up to this length (`PadTo`), ``labels`` with -100.
        pack_to: documents, which are token ids, are joined and cut into rows of this length; what separates them is part of them.
        lengths: tokens of each sample of a dataset.
        balance: where there are ``lengths``, the samples of a global batch are put into an order in which every part has its share of the
            tokens, whatever the plan.
        shuffle_buffer: elements of a stream among which the next one is chosen.
        slots: into which a stream is dealt; they divide the global batch, and are as many if None.
        workers: processes of each rank that read its samples ahead; 1 at most for a stream. 0: samples are read when they are needed.
        prefetch: global batches of which each of these processes has the rank's samples ready.

    Raises DataError for data that is empty or cannot be taken so.
    """
    if collate is not None and pad_to is not None:
        raise DataError("give collate or pad_to, not both: a collator pads by itself")
    chosen = collate or (default_collate if pad_to is None else PadTo(pad_to))
    if is_map_style(dataset) and not isinstance(dataset, str | bytes):
        if pack_to is not None:
            dataset, lengths = PackedRows(dataset, pack_to, lengths), None
        source: DatasetSource | StreamSource = DatasetSource(
            dataset=dataset,
            batch_size=global_batch_size,
            seed=seed,
            collate=chosen,
            shuffle=shuffle,
            lengths=lengths,
            balance=balance,
            workers=workers,
            prefetch=prefetch,
            name=type(dataset).__name__,
        )
        return Batches(source, epochs=epochs)
    if epochs is not None or lengths is not None:
        raise DataError("a stream has no number of samples: leave out epochs and lengths, and end the loop by yourself")
    if isinstance(dataset, str | bytes) or not (hasattr(dataset, "__iter__") or callable(dataset)):
        raise DataError(
            f"a {type(dataset).__name__} is no data: give a dataset, an iterable, or a function that makes one"
        )
    source = StreamSource(
        dataset,
        batch_size=global_batch_size,
        seed=seed,
        slots=slots,
        shuffle_buffer=shuffle_buffer,
        packed_length=pack_to,
        collate=chosen,
        name=type(dataset).__name__,
        workers=workers,
        prefetch=prefetch,
    )
    return Batches(source, epochs=None)
