"""Which loaders are dealt, and what is said of others; one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler
from torch.utils.data import DistributedSampler as EqualSampler

import heterodyne as hd

DATA = TensorDataset(torch.arange(10.0).view(10, 1))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


class Endless(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


class OwnPart(Sampler[int]):
    rank = 0

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter([3, 4])


class Backwards(EqualSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(DATA))[::-1])


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        for (x,) in super().__iter__():
            yield 2 * x


@pytest.fixture
def model() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield hd.DistributedDataParallel(nn.Linear(1, 1), loss_count="samples")
    dist.destroy_process_group()


def indices(loader: Any) -> list[list[int]]:
    return [batch[0].int().view(-1).tolist() for batch in loader]


def test_the_order_is_that_of_the_scripts_own_sampler(model: Any) -> None:
    equal: Any = EqualSampler(DATA, seed=2)
    found: Any = hd.prepare_loader(DataLoader(DATA, batch_size=4, sampler=equal), model)
    for epoch in (0, 3):
        found.sampler.set_epoch(epoch)
        assert equal.epoch == epoch
        order = list(equal)
        assert indices(found) == [order[:4], order[4:8], order[8:]]
    assert len(found) == 3
    assert indices(hd.prepare_loader(DataLoader(DATA, batch_size=4, drop_last=True), model)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    rare = WeightedRandomSampler([0.0] * 9 + [1.0], num_samples=3)
    assert indices(hd.prepare_loader(DataLoader(DATA, batch_size=2, sampler=rare), model)) == [[9, 9], [9]]
    own: Any = hd.DistributedSampler(DATA, shuffle=False)  # type: ignore[arg-type]
    assert indices(hd.prepare_loader(DataLoader(DATA, batch_size=8, sampler=own), model)) == [[*range(8)], [8, 9]]
    own = hd.DistributedSampler(DATA, shuffle=False, batch_size=8)  # type: ignore[arg-type]
    assert indices(hd.prepare_loader(DataLoader(DATA, batch_sampler=own), model)) == [[*range(8)], [8, 9]]


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (lambda: [torch.zeros(1)], "a list is no DataLoader"),
        (lambda: DataLoader(Stream(), batch_size=None), "batch_size=None.*leave prepare_loader out"),
        (lambda: DataLoader(DATA, batch_sampler=[[0], [1]]), "make it hd.DistributedSampler"),
        (lambda: DataLoader(DATA, batch_size=None), "it has no batches"),
        (lambda: Doubling(DATA), "Doubling has an __iter__ of its own"),
        (lambda: DataLoader(DATA, sampler=Backwards(DATA, 1, 0)), "Backwards has an order of its own"),
        (lambda: DataLoader(DATA, sampler=OwnPart()), "OwnPart gives each rank samples of its own"),
        (lambda: DataLoader(DATA, sampler=EqualSampler(DATA, 2, 0)), "for 2 ranks, and there are 1"),
        (lambda: DataLoader(Endless(), sampler=iter([0])), "it has no length"),
    ],
)
def test_a_loader_that_cannot_be_dealt_is_told_why(model: Any, loader: Any, told: str) -> None:
    with pytest.raises(hd.HeterodyneError, match=told):
        hd.prepare_loader(loader(), model)


def test_an_order_that_is_drawn_anew_is_not_resumed_in_the_middle(model: Any) -> None:
    loader: Any = hd.prepare_loader(DataLoader(DATA, batch_size=4, shuffle=True), model)
    next(batches := iter(loader))
    state = loader.state_dict()
    del batches
    with pytest.raises(hd.HeterodyneError, match="draws another order each time"):
        loader.load_state_dict(state)


def test_the_mean_before_any_forward_and_a_lazy_model_are_refused(model: Any) -> None:
    with pytest.raises(hd.HeterodyneError, match="there was none yet"):
        model.mean(1.0)
    with pytest.raises(hd.HeterodyneError, match="'weight' has no shape before the first forward"):
        hd.DistributedDataParallel(nn.LazyLinear(1))


def test_what_is_asked_for_in_vain_is_told_by_name(model: Any) -> None:
    loader: Any = DataLoader(DATA)
    for models in ((), (nn.Linear(1, 1),), (nn.parallel.DistributedDataParallel(nn.Linear(1, 1)),)):
        with pytest.raises(hd.HeterodyneError, match=r"each an hd\.DistributedDataParallel"):
            hd.prepare_loader(loader, *models)  # type: ignore[arg-type]
    with pytest.raises(hd.HeterodyneError, match="one positive number for each of the 1 ranks"):
        hd.prepare_loader(loader, model, shares=[0.5, 0.5])
    with pytest.raises(hd.HeterodyneError, match="shares are 'fast': give one positive number"):
        hd.prepare_loader(loader, model, shares="fast")  # type: ignore[arg-type]
    for options, told in (
        ({"loss_count": "words"}, "'words'; it is 'samples', 'tokens'"),
        ({"mixed_precision": object(), "device_mesh": object()}, "(?s)mixed_precision: .*autocast.*device_mesh: "),
    ):
        with pytest.raises(hd.HeterodyneError, match=told):
            hd.DistributedDataParallel(nn.Linear(1, 1), **options)
    with pytest.raises(hd.HeterodyneError, match=r"already; pass its \.module"):
        hd.DistributedDataParallel(model)
    with pytest.raises(hd.HeterodyneError, match=r"count\(-1\)"):
        model.count(-1)
    with pytest.raises(hd.HeterodyneError, match="no tensor with a leading size"):
        hd.DistributedDataParallel(nn.Linear(1, 1))(torch.tensor(1.0))


def test_a_count_holds_in_its_block_or_for_one_backward(model: Any) -> None:
    def counted() -> float:
        model(torch.ones(4, 1)).mean().backward()
        assert model._reduction.weight is not None
        return float(model._reduction.weight.own)

    assert counted() == 4
    model.count(3)
    assert [counted(), counted()] == [3, 4]
    with model.count(2):
        pass
    assert counted() == 4


def test_a_script_without_a_process_group_is_told_to_make_one() -> None:
    with pytest.raises(hd.HeterodyneError, match="init_process_group"):
        hd.DistributedDataParallel(nn.Linear(1, 1))
