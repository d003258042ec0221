"""Scripts of Accelerate on unequal shares: losses, weights and metrics are those of one process with the global batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

pytest.importorskip("accelerate")
from accelerate import state
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs

import heterodyne as hd
from heterodyne.errors import HeterodyneError, VerifyError
from heterodyne.integrations.accelerate import Accelerator
from multiprocess.pool import Pool, World

pytestmark = pytest.mark.filterwarnings("ignore")
RANKS, GLOBAL, SIZE = 3, 12, 38  # the last batch has fewer samples than there are ranks
SHARES = [1.0, 2.0, 5.0]


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 9, (6,), generator=draw)
        labels = ids.masked_fill(torch.arange(6) > index % 6, -100)
        x = torch.randn(5, generator=draw, dtype=torch.float64)
        return {"x": x, "y": ids[0] % 3, "ids": ids, "labels": labels, "index": torch.tensor(index)}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(torch.tanh(self.words(ids)))
        return {"loss": F.cross_entropy(scores.view(-1, 9), labels.view(-1))}


@contextmanager
def accelerator_of(world: World, **options: Any) -> Iterator[Accelerator]:
    """One that leaves nothing behind in the worker."""
    place = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.world_size}
    named = {name: str(number) for name, number in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    named = named if world.world_size > 1 else {}
    shares = SHARES if world.world_size > 1 else None
    with mock.patch.dict(os.environ, named):
        try:
            yield Accelerator(cpu=True, **{"shares": shares, **options})
        finally:
            state.AcceleratorState._reset_state(True)
            state.GradientState._reset_state()


def loader_of(world: World, **options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(), batch_size=GLOBAL // world.world_size, **options)


def weights(*models: nn.Module) -> list[list[float]]:
    return [parameter.detach().view(-1).tolist() for model in models for parameter in model.state_dict().values()]


def classification(world: World, folder: str) -> dict[str, Any]:
    """Prepared in an order of its own, with accumulation, clipping, evaluation, and a checkpoint in the middle of an epoch."""
    torch.manual_seed(0)
    model: Any = Classifier().double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2 * world.world_size, gamma=0.5)
    found: dict[str, Any] = {"losses": [], "norms": [], "seen": [], "parts": []}
    with accelerator_of(world, gradient_accumulation_steps=2) as accelerator:
        train, scheduler, held_out, optimizer, model = accelerator.prepare(
            loader_of(world, shuffle=True), scheduler, loader_of(world), optimizer, model
        )

        def epoch(batches: Any, save_at: int = -1) -> None:
            model.train()
            for number, batch in enumerate(batches):
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(batch["x"]), batch["y"])
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.2)
                        found["norms"].append(float(norm))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                found["losses"].append(accelerator.mean(loss))
                found["parts"].append(len(batch["x"]))
                if number == save_at:
                    accelerator.save_state(folder)

        def evaluate() -> None:
            model.eval()
            for batch in held_out:
                with torch.no_grad():
                    scores = model(batch["x"])
                found["losses"].append(accelerator.mean(F.cross_entropy(scores, batch["y"])))
                scores, index, names = accelerator.gather_for_metrics((scores, batch["index"], batch["y"]))
                found["seen"].append((scores.tolist(), index.tolist(), names.tolist()))
                found["seen"].append(accelerator.gather_for_metrics([str(each) for each in batch["index"].tolist()]))
                assert accelerator.gather(batch["x"].sum()).numel() == world.world_size
                assert accelerator.gather(batch["index"])[: len(index)].tolist() == index.tolist()

        with accelerator.join_uneven_inputs([model]):
            epoch(train)
        evaluate()
        epoch(train, save_at=1)
        found["weights"] = weights(accelerator.unwrap_model(model))
        count = len(found["losses"])
        accelerator.load_state(folder)
        assert optimizer.param_groups[0]["lr"] < 0.05
        torch.manual_seed(1)
        rest = accelerator.skip_first_batches(train, 2)
        assert len(rest) == 2
        epoch(rest)
        assert len(found["losses"]) == count + 2
    return found


def same(found: Any, wanted: Any, bar: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=bar, atol=bar)


def test_a_classification_script_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    (wanted,) = pool.run(1, classification, str(tmp_path / "one"))
    assert [index for each in wanted["seen"][::2] for index in each[1]] == list(range(SIZE))
    for rank, found in enumerate(pool.run(RANKS, classification, str(tmp_path / "three"))):
        for name in ("losses", "norms", "weights"):
            same(found[name], wanted[name])
        for mine, theirs in zip(found["seen"], wanted["seen"], strict=True):
            same(mine, theirs) if isinstance(mine, tuple) else None
            assert isinstance(mine, tuple) or mine == theirs
        assert found["parts"][:3] == [(1, 3, 8)[rank]] * 3


class OfLikeLength(BatchSampler):
    """Batches of unlike sizes, 1 to 5, as samplers by length have them; drawn from Python's own random numbers on rank 0."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 13

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        begin = self.epoch
        for number in range(13):
            yield list(range(begin, begin + 1 + number % 5))
            begin += 1 + number % 5


def indices(world: World, kind: str) -> list[list[int]]:
    made: dict[str, Callable[[], DataLoader[Any]]] = {
        "lengths": lambda: DataLoader(Samples(), batch_sampler=OfLikeLength()),
        "split": lambda: DataLoader(Samples(), batch_size=GLOBAL, shuffle=True),
        "seedable": lambda: loader_of(world, shuffle=True),
        "drop_last": lambda: loader_of(world, drop_last=True),
    }
    loading = DataLoaderConfiguration(split_batches=kind == "split", use_seedable_sampler=kind == "seedable")
    torch.manual_seed(7)
    with accelerator_of(world, dataloader_config=loading) as accelerator:
        loader: Any = accelerator.prepare(made[kind]())
        return [accelerator.gather_for_metrics(batch["index"]).tolist() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("kind", ["lengths", "split", "seedable", "drop_last"])
def test_each_sample_comes_in_the_step_of_one_process(pool: Pool, kind: str) -> None:
    (wanted,) = pool.run(1, indices, kind)
    if kind == "lengths":  # three batches of the script make a global one
        groups = [wanted[first : min(first + RANKS, end)] for end in (13, 26) for first in range(end - 13, end, RANKS)]
        wanted = [[index for batch in group for index in batch] for group in groups]
    for found in pool.run(RANKS, indices, kind):
        assert found == wanted


def adversaries(world: World) -> list[list[float]]:
    torch.manual_seed(0)
    models: list[Any] = [nn.Linear(5, 5).double(), nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()]
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with accelerator_of(world) as accelerator:
        maker, critic, loader, of_maker, of_critic = accelerator.prepare(*models, loader_of(world), *optimizers)
        for batch in loader:
            z = batch["x"].flip(1)
            of_critic.zero_grad()
            accelerator.backward(critic(maker(z).detach()).square().mean() - critic(batch["x"]).mean())
            of_critic.step()
            of_maker.zero_grad()
            accelerator.backward((critic(maker(z)) - 1).square().mean())
            of_maker.step()
        return weights(*models)


def test_two_models_in_turns_are_those_of_one_process(pool: Pool) -> None:
    (wanted,) = pool.run(1, adversaries)
    for found in pool.run(RANKS, adversaries):
        same(found, wanted)


def language(world: World, count: str) -> list[list[float]]:
    """Means over tokens, or sums that the script itself has divided by the tokens of all ranks, and multiplied for DDP's mean."""
    torch.manual_seed(0)
    model: Any = Language().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    with accelerator_of(world, loss_count=count) as accelerator:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(world))
        for batch in list(loader) if count == "tokens" else loader:  # read ahead
            tokens = (batch["labels"] != -100).sum()
            loss = model(batch["ids"], labels=batch["labels"])["loss"]
            if count == "ranks":
                of_all = accelerator.gather_for_metrics((batch["labels"] != -100).sum(1)).sum()
                loss = loss * tokens / of_all * accelerator.num_processes
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights(accelerator.unwrap_model(model))


@pytest.mark.parametrize("count", ["tokens", "ranks"])
def test_a_loss_over_tokens_is_that_of_one_process(pool: Pool, count: str) -> None:
    (wanted,) = pool.run(1, language, count)
    for found in pool.run(RANKS, language, count):
        same(found, wanted)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randn(8, 5)


def refusals(world: World) -> dict[str, str]:
    found = {}

    def refused(what: str, do: Callable[[], object]) -> None:
        with pytest.raises((HeterodyneError, VerifyError)) as caught:
            do()
        found[what] = str(caught.value)

    refused("plugins", lambda: Accelerator(fsdp_plugin=1, deepspeed_plugin=2))
    hook: Any = DistributedDataParallelKwargs(comm_hook="fp16")
    with accelerator_of(world, kwargs_handlers=[hook]) as accelerator:
        refused("hook", lambda: accelerator.prepare(Classifier()))
        refused("shares", lambda: Accelerator(cpu=True, shares=[1, -1]))
        refused("word", lambda: Accelerator(cpu=True, loss_count="words"))  # type: ignore[arg-type]
        refused("stream", lambda: accelerator.prepare(DataLoader(Stream(), batch_size=2)))
        parted = DataLoader(Samples(), sampler=torch.utils.data.DistributedSampler(Samples()))
        refused("parted", lambda: accelerator.prepare(parted))
        refused("endless", lambda: accelerator.prepare(DataLoader(Samples(), batch_sampler=iter([[0]]))))  # type: ignore[arg-type]
    with accelerator_of(world) as accelerator:
        model: Any = accelerator.prepare(Language())
        assert type(model) is hd.DistributedDataParallel
        assert accelerator.prepare(accelerator.unwrap_model(model)) is not model.module
        batch = next(iter(loader_of(world)))
        refused("count", lambda: model(batch["ids"], labels=batch["labels"]))
    with accelerator_of(world, shares=None) as accelerator:
        stream: Any = accelerator.prepare(DataLoader(Stream(), batch_size=2))
        assert sum(len(accelerator.gather_for_metrics(batch)) for batch in stream) == 8
    return found


def test_what_cannot_be_is_refused_in_words(pool: Pool) -> None:
    for found in pool.run(2, refusals_of_two):
        assert "fsdp_plugin: a model that does not fit one device is for hd.distribute" in found["plugins"]
        assert "deepspeed_plugin: " in found["plugins"]
        assert "one positive number for each of the 2 ranks" in found["shares"]
        assert "loss_count is 'words'" in found["word"]
        assert "a communication hook averages" in found["hook"]
        assert "leave shares= out" in found["stream"]
        assert "without __len__" in found["endless"]
        assert "DistributedSampler gives each rank samples of its own" in found["parted"]
        assert "loss_count='tokens'" in found["count"]


def refusals_of_two(world: World) -> dict[str, str]:
    with mock.patch.dict(globals(), {"SHARES": [2.0, 1.0]}):
        return refusals(world)
