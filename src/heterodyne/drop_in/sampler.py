"""Global batches dealt by shares: the same samples in the same batches as under PyTorch's DistributedSampler, in parts of unlike size.

Global batch k of an epoch is ``order[k G : (k + 1) G]``, whatever the shares are, where G is the batch size of a rank times the ranks: what
DDP would train on in that step. Each rank takes a contiguous part of it, so each sample comes once an epoch. (PyTorch repeats some at the
end, so that ranks have as many. Here a rank for which none is left gets one sample that counts nothing.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler as EqualSampler
from torch.utils.data import Sampler

from heterodyne.errors import CheckpointError, DataError, HeterodyneError
from heterodyne.graph.sharding.dealing import dealt_by_speed

__all__ = ["Dealt", "DistributedSampler", "dealt_of", "handed_out", "noted", "parts_of", "require_shares"]


@dataclass(frozen=True, slots=True)
class Dealt:
    """A rank's part of a global batch: its ``own`` samples of ``total``, and where in the order of the epoch the batch has its ``end``."""

    own: int
    total: int
    end: int


def dealt_of(batch: Any) -> Dealt | None:
    """Return what was noted on the first tensor that has it; None where all were made of other ones."""
    return next(parts_of(batch), None)


def parts_of(batch: Any) -> Iterator[Dealt]:
    """Yield what was noted on the tensors of a batch; several loaders may have dealt it."""
    return (tensor.dealt for tensor in _tensors_in(batch) if hasattr(tensor, "dealt"))


def noted(batch: Any, dealt: Dealt | None) -> Any:
    """Return a batch whose tensors have what was dealt of it."""
    for tensor in _tensors_in(batch):
        tensor.dealt = dealt  # type: ignore[attr-defined]
    return batch


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _tensors_in(part)


def handed_out(
    batches: Iterable[Any], dealer: DistributedSampler, tell: Callable[[Dealt | None], None]
) -> Iterator[Any]:
    """Yield batches that were drawn by ``dealer``, and ``tell`` what each is of its global batch; None at the end.

    Tensors of a batch have it too (`dealt_of`), for a loop that reads batches before it trains on them.
    """
    try:
        for batch in batches:
            dealt = dealer.hand_out()
            tell(dealt)
            yield noted(batch, dealt)
        dealer.end()
    finally:
        tell(None)


class DistributedSampler(Sampler[list[int]]):
    """Each rank's part of every global batch, as a list of indices: ``DataLoader(dataset, batch_sampler=sampler)``.

    Args:
        dataset, num_replicas, rank, shuffle, seed, drop_last: as PyTorch's; the order of an epoch is the same.
        batch_size: of a rank where all have as much. Without it, this is a ``sampler=`` for `prepare_loader`, which knows the batch size.
        shares: of each rank in the global batch, in any unit; they then stay as they are. None: equal ones, until `prepare_loader` has set
            them by the ranks' own pace.

    Raises HeterodyneError for shares that are none.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,  # as PyTorch has it
        seed: int = 0,
        drop_last: bool = False,
        *,
        batch_size: int | None = None,
        shares: Sequence[float] | None = None,
    ) -> None:
        self.dataset = dataset
        self.samples = len(dataset)
        """Of an epoch."""
        self.can_resume = True
        """Whether the order of an epoch can be had again."""
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.batch_size = batch_size
        self._epoch = 0
        self._decides: EqualSampler[Any] | None = None  # the script's own sampler, whose epoch it sets
        self.order: Callable[[], Sequence[int]] = self._shuffled
        self.fixed = shares is not None
        self.shares = require_shares(shares, self.num_replicas)
        self.drawn = self.handed_out = (
            0  # batches of this pass over the data; a rank may have made passes by itself, to look at a batch
        )
        self.digest: str | None = None
        """Of samples of a stream that were read, which are to be the same on every rank."""
        self._passes = 0
        self._coming: tuple[tuple[float, ...], tuple[int, int]] | None = None  # shares, from which pass and batch on
        self._ahead: deque[Dealt] = deque()  # drawn, but not handed out yet
        self._is_read_ahead = False
        self._done = (0, 0)  # an epoch, and how many of its samples were handed out
        self._resumes = False

    @property
    def global_batch_size(self) -> int:
        if self.batch_size is None:
            raise DataError(
                "this sampler knows no batch size: pass the DataLoader that has it through hd.prepare_loader(loader, model), or make it "
                "with batch_size= and give it to DataLoader(batch_sampler=...)"
            )
        return self.batch_size * self.num_replicas

    def deal(self, samples: int) -> tuple[int, ...]:
        """Return how many of so many samples each rank takes."""
        return dealt_by_speed(self.shares, samples)

    @property
    def epoch(self) -> int:
        """The epoch that decides the order."""
        return self._epoch if self._decides is None else self._decides.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as PyTorch's sampler does."""
        self._epoch = epoch
        if self._decides is not None:
            self._decides.set_epoch(epoch)

    def follow_epoch_of(self, sampler: EqualSampler[Any]) -> None:
        """Let another sampler, whose ``set_epoch`` the script calls, decide the epoch."""
        self._decides = sampler

    def __len__(self) -> int:
        batches, rest = divmod(self.samples, self.global_batch_size)
        return batches + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        begin = self._done[1] if self._resumes and self._done[0] == self.epoch else 0
        self._resumes = False
        self._ahead.clear()
        self._passes, self.drawn, self.handed_out = self._passes + 1, 0, 0
        counts: dict[int, tuple[int, ...]] = {}
        for first, batch in self.batches(begin):
            if self._coming is not None and (self._passes, self.drawn) >= self._coming[1]:
                self.shares, self._coming = self._coming[0], None
                counts.clear()
            if len(batch) not in counts:
                counts[len(batch)] = self.deal(len(batch))
            own, before = counts[len(batch)][self.rank], sum(counts[len(batch)][: self.rank])
            self._ahead.append(Dealt(own, len(batch), first + len(batch)))
            self.drawn += 1
            if not self._is_read_ahead:
                self.hand_out()
                if len(batch) < self.num_replicas:
                    raise DataError(
                        f"the last batch has {len(batch)} samples for {self.num_replicas} ranks: set drop_last=True, or pass the "
                        "DataLoader through hd.prepare_loader(loader, model), which tells the model that a rank has none"
                    )
            yield list(batch[before : before + own] or batch[:1])
        if not self._is_read_ahead:
            self.end()

    def batches(self, begin: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the global batches of an epoch behind so many of its samples, each with the place of its first one."""
        order, size = self.order(), self.global_batch_size
        for first in range(begin, len(order), size):
            batch = order[first : first + size]
            if len(batch) == size or not self.drop_last:
                yield first, batch

    def read_ahead(self) -> None:
        """Called by a loader that draws batches before they are trained on, and calls `hand_out` for each, `end` behind the last."""
        self._is_read_ahead = True

    def hand_out(self) -> Dealt:
        """Return what was dealt of the next batch that is trained on."""
        dealt = self._ahead.popleft()
        self.handed_out += 1
        self._done = (self.epoch, dealt.end)
        return dealt

    def end(self) -> None:
        """Called behind the last batch of an epoch."""
        self._done = (self.epoch, 0)

    def renew(self, shares: Sequence[float], begin: int) -> None:
        """Set the shares from that batch of this pass on, which no rank has drawn yet."""
        self._coming = (tuple(shares), (self._passes, begin))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the samples of it that were trained on, and the shares. The same on every rank."""
        shares = self.shares if self._coming is None else self._coming[0]
        epoch, samples = self._done
        return {"epoch": self.epoch, "samples": samples if epoch == self.epoch else 0, "shares": list(shares)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the samples that were trained on, also with another number of ranks, if the epoch is still the same."""
        try:
            epoch, samples, shares = (
                int(state["epoch"]),
                int(state["samples"]),
                [float(each) for each in state["shares"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"no state of a sampler ({error!r}): it has 'epoch', 'samples' and 'shares'"
            ) from error
        if samples and not self.can_resume:
            raise CheckpointError(
                "this sampler draws another order each time, so the samples that are left of the epoch are not known: use a "
                "DistributedSampler (of torch or hd), whose order follows from seed and epoch"
            )
        self.set_epoch(epoch)
        self._done, self._resumes = (epoch, samples), True
        if len(shares) == self.num_replicas and not self.fixed:
            self.shares, self._coming = require_shares(shares, self.num_replicas), None

    def _shuffled(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self.samples)
        drawn = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        return drawn[: self.samples].tolist()


def require_shares(shares: Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    """Return the share of each rank, equal ones for None. Raises HeterodyneError for what is no positive number for each rank."""
    try:
        given = (1.0,) * ranks if shares is None else tuple(float(each) for each in shares)
    except (TypeError, ValueError):
        given = ()
    if len(given) != ranks or not all(0 < each < float("inf") for each in given):
        raise HeterodyneError(
            f"shares are {shares!r}: give one positive number for each of the {ranks} ranks, such as {[1.0] * ranks}"
        )
    return given
