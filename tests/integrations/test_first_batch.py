"""A look at the first batch leaves the order, the draws and the contents of all batches as they are without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from heterodyne.errors import DataError
from heterodyne.integrations.first_batch import first_batch, resumed

SAMPLES, SIZE = 12, 4


class Noisy(Dataset[Tensor]):
    """Each read draws from every generator, and from one of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)
        self.transforms = [random.Random(4)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random(), self.own.random()]
        return torch.tensor([index, *drawn, self.transforms[0].random()], dtype=torch.float64)


class Turning(Sampler[int]):
    """Begins one sample later in each epoch."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter([(self.begun + i) % SAMPLES for i in range(SAMPLES)])

    def __len__(self) -> int:
        return SAMPLES


class Stream(IterableDataset[Tensor]):
    """One pass over a source: a second iteration goes on where the first has ended."""

    def __init__(self) -> None:
        self.source = iter(range(3 * SAMPLES))

    def __iter__(self) -> Iterator[Tensor]:
        for number in self.source:
            if number % SAMPLES == SAMPLES - 1:
                return
            yield torch.tensor([number, torch.rand(()).item(), np.random.rand()], dtype=torch.float64)


class Batches:
    """A loader of one's own, with a state."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def __iter__(self) -> Iterator[Tensor]:
        order = self.own.sample(range(SAMPLES), SAMPLES)
        return (torch.tensor([number, random.random()]) for number in order)


def generated() -> Iterator[Tensor]:
    yield from (torch.tensor([number, torch.rand(()).item()]) for number in range(SAMPLES))


def collate_with(own: torch.Generator) -> Callable[[list[Tensor]], Tensor]:
    return lambda rows: torch.stack(rows) + torch.rand((), generator=own)


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "list": lambda: [torch.arange(4) + i for i in range(3)],
    "generator": generated,
    "own loader": Batches,
    "shuffled": lambda: DataLoader(Noisy(), SIZE, shuffle=True),
    "generator of its own": lambda: DataLoader(
        Noisy(), SIZE, shuffle=True, generator=torch.Generator().manual_seed(1),
        collate_fn=collate_with(torch.Generator().manual_seed(2)),
    ),
    "sampler with a state": lambda: DataLoader(Noisy(), SIZE, sampler=Turning()),
    "sampler that cannot be copied": lambda: DataLoader(Noisy(), SIZE, sampler=(i for i in range(SAMPLES))),
    "no batching": lambda: DataLoader(Noisy(), None, shuffle=True),
    "one pass": lambda: DataLoader(Stream(), SIZE),
    "resumed": lambda: DataLoader(resumed(Stream()), SIZE),
    "workers": lambda: DataLoader(Noisy(), SIZE, shuffle=True, num_workers=1, persistent_workers=True),
}  # fmt: skip


def read(make: Callable[[], Iterable[Any]], look: bool, between: Callable[[], None]) -> tuple[list[Tensor], Any]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)  # type: ignore[operator]
    loader, looked = make(), None
    if look:
        looked, loader = first_batch(loader)
    between()
    return [batch for _ in range(2) for batch in loader], looked


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gives_what_it_gives_without_the_look(name: str) -> None:
    expected, _ = read(LOADERS[name], False, lambda: None)
    found, looked = read(LOADERS[name], True, lambda: None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(looked.shape, expected[0].shape)


@pytest.mark.parametrize("name", ["shuffled", "generator of its own"])
def test_a_seed_that_is_set_between_counts(name: str) -> None:
    expected, _ = read(LOADERS[name], False, lambda: torch.manual_seed(9) and None)
    found, _ = read(LOADERS[name], True, lambda: torch.manual_seed(9) and None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.tour("integrations/")
def test_an_epoch_that_is_set_between_counts() -> None:
    sampler = DistributedSampler(Noisy(), num_replicas=1, rank=0, seed=0)
    _, loader = first_batch(DataLoader(range(SAMPLES), SIZE, sampler=sampler))  # type: ignore[arg-type]
    sampler.set_epoch(3)
    assert torch.cat(list(loader)).tolist() == list(sampler)


def test_a_stream_gives_its_next_epoch_if_that_is_asked_for() -> None:
    class Epochs(IterableDataset[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(100 * self.epoch, 100 * self.epoch + 4))

    for epoch in (0, 1):
        dataset = resumed(Epochs())
        first_batch(DataLoader(dataset, 2))
        dataset.set_epoch(epoch)
        assert list(dataset) == [100 * epoch + i for i in range(4)]


def test_a_loader_without_batches_is_told() -> None:
    for empty in ([], iter([]), DataLoader([], 1)):  # type: ignore[var-annotated]
        with pytest.raises(DataError, match="the loader has no batches"):
            first_batch(empty)
