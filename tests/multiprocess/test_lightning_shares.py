"""Lightning's DDP on unequal shares: weights, logs, metrics and decisions are those of one process with the global batch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from heterodyne.errors import HeterodyneError
from multiprocess.pool import Pool, World

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from heterodyne.integrations.lightning import DDPStrategy

pytestmark = pytest.mark.filterwarnings("ignore")
RANKS, GLOBAL, SIZE = 3, 12, 38  # the last batch has fewer samples than there are ranks
SHARES = [1.0, 2.0, 5.0]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, size: int = SIZE) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 9, (6,), generator=draw)
        labels = ids.masked_fill(torch.arange(6) > index % 6, -100)
        x = torch.randn(5, generator=draw, dtype=torch.float64)
        return {"x": x, "y": ids[0] % 3, "ids": ids, "labels": labels, "index": torch.tensor(index)}


class Classifier(L.LightningModule):
    """Reads the Trainer, logs in all ways, and looks at gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.seen, self.right = MeanMetric().double(), MulticlassAccuracy(3, average="micro")
        self.norms: list[float] = []
        self.steps: list[tuple[int, float]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.body(batch["x"]), batch["y"]) * (1 + self.trainer.current_epoch + batch_idx % 2)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", batch["x"].max(), on_step=True, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("samples", float(len(batch["x"])), on_epoch=True, on_step=True, reduce_fx="sum", sync_dist=True)
        self.seen.update(batch["index"].double())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.steps.append((batch_idx, float(self.trainer.strategy.reduce(loss.detach()))))
        return loss

    def on_after_backward(self) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self.norms.append(float(nn.utils.get_total_norm(gradients)))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        scores = self.body(batch["x"])
        self.right(scores, batch["y"])
        self.log("right", self.right, on_step=False, on_epoch=True)
        self.log("val_loss", F.cross_entropy(scores, batch["y"]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        strategy, ranks = self.trainer.strategy, torch.tensor([self.global_rank])
        if isinstance(strategy, DDPStrategy):  # also behind a batch of which a rank has no sample
            assert strategy.gather(ranks).tolist() == list(range(strategy.world_size))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return batch["index"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.body.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Epochs(Callback):
    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.found.append({name: float(value) for name, value in trainer.callback_metrics.items()} | {"lr": rate})


@contextmanager
def place_of(world: World, **options: Any) -> Iterator[dict[str, Any]]:
    """What a Trainer gets on this rank; one process has Lightning's own strategy."""
    place = {"LOCAL_RANK": str(world.rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with warnings.catch_warnings(), mock.patch.dict(os.environ, place if world.world_size > 1 else {}):
        warnings.simplefilter("ignore")
        options = {"shares": SHARES[: world.world_size], **options}
        shared = {"strategy": DDPStrategy(**options)} if world.world_size > 1 else {}
        yield {**QUIET, "devices": world.world_size, **shared}


def loader_of(world: World, sampler: str = "injected", data: Any = None, **options: Any) -> DataLoader[Any]:
    data = Samples() if data is None else data
    if world.world_size == 1:
        options["sampler"] = DistributedSampler(data, 1, 0)
    elif sampler == "own":
        options["sampler"] = DistributedSampler(data, world.world_size, world.rank)
    return DataLoader(data, batch_size=GLOBAL // world.world_size, **options)


def held_out(world: World) -> DataLoader[Any]:
    return DataLoader(Samples(26), batch_size=GLOBAL // world.world_size)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def fit(
    world: World, folder: str, options: dict[str, Any], resume: str | None = None, sampler: str = "injected"
) -> dict[str, Any]:
    with place_of(world) as place:
        epochs, module = Epochs(), Classifier()
        stops = EarlyStopping("val_loss", patience=4, min_delta=0.01)
        keeps = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = L.Trainer(max_epochs=6, callbacks=[epochs, stops, keeps], **place, **options)
        trainer.fit(module, loader_of(world, sampler), held_out(world), ckpt_path=resume)
        tested = trainer.test(module, held_out(world), verbose=False)
        parts: Any = trainer.predict(module, held_out(world))
        return {
            "weights": weights(module),
            "steps": module.steps,
            "norms": module.norms,
            "epochs": epochs.found,
            "stopped": stops.stopped_epoch,
            "hooks": len(module.body[1]._forward_hooks),
            "tested": tested,
            "predicted": torch.cat(parts).tolist(),
            "kept": sorted(each.name for each in Path(folder).iterdir()),
        }


def same(found: Any, wanted: Any, bar: float = 1e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=bar, atol=bar)


RUN = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "val_check_interval": 2, "num_sanity_val_steps": 1}


@pytest.mark.parametrize("sampler", ["injected", "own"])
def test_a_script_is_that_of_one_process(pool: Pool, tmp_path: Path, sampler: str) -> None:
    """Also where an epoch leaves a rest, that is one batch with a rank that has no sample of it; and behind a checkpoint."""
    (wanted,) = pool.run(1, fit, str(tmp_path / "one"), RUN)
    ranks = pool.run(RANKS, fit, str(tmp_path / "three"), RUN, None, sampler)
    assert sorted(index for found in ranks for index in found["predicted"]) == sorted(wanted["predicted"])
    for found in ranks:
        assert found["kept"] == wanted["kept"]
        for name in set(wanted) - {"predicted", "kept"}:
            same(found[name], wanted[name])
    if sampler == "own" or L.__version__ < "2.6":  # older ones count the last batch before a checkpoint twice
        return
    in_middle = str(tmp_path / "three" / "step=5.ckpt")
    for ranks_then in (RANKS, 2):
        found = pool.run(ranks_then, fit, str(tmp_path / f"middle{ranks_then}"), RUN, in_middle)[-1]
        same(found["steps"], wanted["steps"][-1:])
        same(found["weights"], wanted["weights"])
    at_end = str(tmp_path / "three" / "step=4.ckpt")
    (plain,) = pool.run(1, fit, str(tmp_path / "plain"), RUN, at_end)
    for found in pool.run(RANKS, fit, str(tmp_path / "end"), RUN, at_end):
        for name in ("steps", "weights", "stopped", "tested"):
            same(found[name], plain[name])


class Adversaries(L.LightningModule):
    """Two optimizers by hand, of which one trains at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.maker = nn.Linear(5, 5).double()
        self.critic = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        z, (of_maker, of_critic) = batch["x"].flip(1), optimizers
        self.toggle_optimizer(of_critic)
        of_critic.zero_grad()
        self.manual_backward(self.critic(self.maker(z).detach()).square().mean() - self.critic(batch["x"]).mean())
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_maker)
        of_maker.zero_grad()
        loss = (self.critic(self.maker(z)) - 1).square().mean()
        self.manual_backward(loss)
        of_maker.step()
        self.untoggle_optimizer(of_maker)
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.maker, self.critic)]


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, 4).double(), nn.Linear(4, 9).double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        scores = self.head(torch.tanh(self.words(batch["ids"])))
        return {"loss": F.cross_entropy(scores.view(-1, 9), batch["labels"].view(-1))}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Contrast(L.LightningModule):
    """Its loss compares all samples of the global batch with each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 4).double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        strategy, own = self.trainer.strategy, self.body(batch["x"])
        every = strategy.gather(own) if isinstance(strategy, DDPStrategy) else own
        return torch.logsumexp(every @ every.T, 1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_words(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


MODULES: dict[str, Any] = {
    "two optimizers": (Adversaries, {"find_unused_parameters": True}),
    "tokens": (Language, {"loss_count": "tokens"}),
    "a function": (Language, {"loss_count": of_words}),
    "compared samples": (Contrast, {}),
}


def trained(world: World, name: str) -> dict[str, Tensor]:
    kind, options = MODULES[name]
    module = kind()
    with place_of(world, **options) as place:
        trainer = L.Trainer(enable_checkpointing=False, **place)
        for epochs in (1, 2):  # what a fit leaves behind must not disturb the next one
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, loader_of(world))
    return weights(module)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_weights_are_those_of_one_process(pool: Pool, name: str) -> None:
    (wanted,) = pool.run(1, trained, name)
    for found in pool.run(RANKS, trained, name):
        same(found, wanted)


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, world: World) -> None:
        self._own = range(world.rank * GLOBAL, (world.rank + 1) * GLOBAL, 1 + world.rank)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Samples()[index] for index in self._own)


class Seen(Language):
    """Notes which samples a step has, over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        batch = batch[0] if isinstance(batch, list) else batch
        strategy: Any = self.trainer.strategy
        self.samples.append(strategy.gather(batch["index"]).tolist())
        self.log("size", float(len(batch["index"])), sync_dist=True, on_step=True)
        return super().training_step(batch, batch_idx)


class Stacks(Seen):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        ranks: Any = self.all_gather(torch.tensor(self.global_rank))
        assert ranks.tolist() == list(range(self.trainer.world_size))
        self.all_gather(batch["x"])
        return super().training_step(batch, batch_idx)


class Skips(Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Reads(Language):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


def others(world: World) -> dict[str, Any]:
    """What else may come, and what is refused."""
    found: dict[str, Any] = {}

    def fit(module: Any, loader: Any, options: Any = None, **of_trainer: Any) -> Any:
        with place_of(world, **(options or {})) as place:
            L.Trainer(max_epochs=2, enable_checkpointing=False, **place, **of_trainer).fit(module, loader)
        return module

    def refused(what: str, do: Any) -> None:
        with pytest.raises((HeterodyneError, RuntimeError, NotImplementedError)) as caught:
            do()
        found[what] = str(caught.value)

    weighted = WeightedRandomSampler([1.0] * SIZE, 14, replacement=False)
    found["weighted"] = fit(Seen(), DataLoader(Samples(), 4, sampler=weighted)).samples
    found["stream"] = fit(Seen(), DataLoader(Stream(world), 6 // (1 + world.rank))).samples
    found["own"] = fit(
        Seen(), DataLoader(Samples(), 2, sampler=[world.rank, 5 + world.rank]), use_distributed_sampler=False
    ).samples
    found["mixed"] = weights(fit(Seen(), loader_of(world), {"process_group_backend": "gloo"}, precision="bf16-mixed"))
    found["pace"] = fit(Seen(), loader_of(world), {"shares": None}, reload_dataloaders_every_n_epochs=1).samples
    both = [loader_of(world), DataLoader(Samples(), batch_size=5)]
    refused("loaders", lambda: fit(Seen(), both))
    refused("stack", lambda: fit(Stacks(), loader_of(world)))
    refused("skip", lambda: fit(Skips(), loader_of(world)))
    refused("iterator", lambda: fit(Reads(), loader_of(world)))
    refused("no batches", lambda: fit(Seen(), DataLoader(Samples(), batch_size=None)))
    refused("shares", lambda: fit(Seen(), loader_of(world), {"shares": [1, 0]}))
    refused("hook", lambda: DDPStrategy(ddp_comm_hook=print))
    refused("word", lambda: DDPStrategy(loss_count="words"))  # type: ignore[arg-type]
    return found


def test_what_else_comes_is_dealt_or_refused_in_words(pool: Pool) -> None:
    first, *more = pool.run(2, others)
    assert [len(each) for each in first["weighted"]] == [8, 6, 8, 6]
    assert len({*first["weighted"][0], *first["weighted"][1]}) == 14
    assert first["stream"] == [[*range(6), 12, 14, 16], [*range(6, 12), 18, 20, 22]] * 2
    assert first["own"] == [[0, 5, 1, 6]] * 2
    for found in more:
        for name in ("weighted", "stream", "own", "mixed", "pace"):
            same(found[name], first[name])
    assert sorted(index for step in first["pace"][:4] for index in step) == list(range(SIZE))
    assert "global batches have 10 and 12 samples" in first["loaders"]
    assert "use self.trainer.strategy.gather(tensor)" in first["stack"]
    assert "returning None in distributed training is not supported" in first["skip"]
    assert "let it take the batch" in first["iterator"]
    assert "batch_size=None" in first["no batches"]
    assert "one positive number for each of the 2 ranks" in first["shares"]
    assert "ddp_comm_hook: these average" in first["hook"]
    assert "loss_count is 'words'" in first["word"]


def test_both_packages_of_lightning_have_a_strategy_of_their_own() -> None:
    import pytorch_lightning

    from heterodyne.integrations import pytorch_lightning as other

    assert issubclass(other.DDPStrategy, pytorch_lightning.strategies.DDPStrategy)
    assert issubclass(DDPStrategy, L.pytorch.strategies.DDPStrategy)
    assert pytorch_lightning.Trainer(
        strategy=other.DDPStrategy(shares=[1.0]), accelerator="cpu", devices=1, logger=False
    )
