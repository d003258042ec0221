"""A Lightning script under a plan: what it logs, writes and returns is that of one process."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from heterodyne.api import LossOptions, PlanOptions
from heterodyne.errors import DataError, HeterodyneError
from heterodyne.frontend import trace
from heterodyne.frontend.opaque import opaque, read_count
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import session_of
from multiprocess.work import PipelineOf, StageOf, cluster_of, plan_of, staged_plan
from pure.build import linear, profile

pytest.importorskip("lightning")

import lightning as L
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from heterodyne.integrations.lightning import HeterodyneStrategy
from heterodyne.integrations.lightning.training_step import BatchForm, TrainingStep

GLOBAL, EPOCHS, SAMPLES = 8, 4, 40


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(ids)).sum(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, labels = batch
        scores = self(ids)
        loss = F.cross_entropy(scores, labels)
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, batch_size=len(ids))
        self.log_dict({"right": (scores.argmax(-1) == labels).float().mean(), "largest": scores.max()})
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        ids, labels = batch
        scores = self(ids)
        self.log("val_loss", F.cross_entropy(scores, labels))
        self.log("val_right", (scores.argmax(-1) == labels).float().mean())

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.2}, {"params": others}], lr=0.02, eps=1e-3
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Annealed(Classifier):
    """What it does follows the step, so no graph can hold it."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        ids, labels = batch
        return {"loss": F.cross_entropy(self(ids), labels) / (1 + self.global_step)}


def data(samples: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (samples,), generator=generator).tolist()
    rows = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]
    return [(row, row[0] % 3) for row in rows]


def padded(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row for row, _ in rows], batch_first=True)
    return ids, torch.stack([label for _, label in rows])


def at_one_length(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    ids, labels = padded(rows)
    return F.pad(ids, (0, 7 - ids.shape[1])), labels


def loader(samples: int, seed: int, size: int = GLOBAL) -> Any:
    return DataLoader(data(samples, seed), batch_size=size, collate_fn=padded if size == GLOBAL else at_one_length)


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def script(
    folder: str, resume: str | None = None, kind: Any = Classifier, size: int = GLOBAL, **more: Any
) -> dict[str, Any]:
    """What people write, and what they look at."""
    losses = Losses()
    keeping = ModelCheckpoint(
        dirpath=folder, filename="{epoch}", save_top_k=-1, monitor="val_loss" if kind is Classifier else None
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses, keeping],
        **more,
    )
    module = kind()
    trainer.fit(module, loader(SAMPLES, 1, size), loader(11, 2), ckpt_path=resume)
    predictions = torch.cat(trainer.predict(module, loader(5, 3)))
    trainer.save_checkpoint(Path(folder) / "end.ckpt")
    return {
        "losses": losses.losses,
        "epochs": losses.epochs,
        "best": Path(keeping.best_model_path).name,
        "predictions": predictions,
        "weights": {name: weight.detach().clone() for name, weight in module.state_dict().items()},
    }


def on_ranks(world: World, graph: ModelGraph, plan: Plan, options: dict[str, Any], distribution: Any) -> dict[str, Any]:
    said = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.world_size, "MASTER_PORT": 1}
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", **{name: str(v) for name, v in said.items()}}):
        _ignore_advice()
        session = session_of(world)
        known = profile(graph, session.cluster, [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6)
        strategy = HeterodyneStrategy(plan=PlanOptions(plan, profile=known), session=session, **distribution)
        return script(strategy=strategy, **options)


@functools.cache
def graph() -> ModelGraph:
    module, batch = Classifier(), next(iter(loader(SAMPLES, 1)))
    step = TrainingStep(module, BatchForm(batch), None, (0,))
    return trace(step, step.surroundings.form.named(batch), name="TrainingStep").graph


@functools.cache
def opaque_graph() -> ModelGraph:
    batch, count = next(iter(loader(SAMPLES, 1, GLOBAL // 2))), read_count("samples")
    step = TrainingStep(Classifier(), BatchForm(batch), None, (0,))
    named, seen = step.surroundings.form.named(batch), {"random": False, "batch_norm": False}
    return opaque(step, named, reason="", loss=count.loss, count=count, name="TrainingStep", **seen).graph


def data_plan(shares: Sequence[Sequence[int]]) -> Plan:
    return plan_of(graph(), cluster_of(len(shares)), shares)


def pipeline_plan() -> Plan:
    found = graph()
    cut = next(number for number, op in enumerate(found.ops) if "tanh" in op.target) + 1
    stages = (StageOf(cut, (0,), (1,)), StageOf(len(found.ops), (1,), (1,)))
    return staged_plan(found, cluster_of(2), [PipelineOf((4, 4), stages)], "1F1B")


def require_equal(found: dict[str, Any], plain: dict[str, Any], left_out: Sequence[str] = (), since: int = 0) -> None:
    steps = len(plain["losses"]) // EPOCHS
    assert found["losses"] == pytest.approx(plain["losses"][since * steps :], rel=1e-5)
    for one, of in zip(found["epochs"], plain["epochs"][since:], strict=True):
        assert one == pytest.approx({name: v for name, v in of.items() if name not in left_out}, rel=1e-5)
    torch.testing.assert_close(found["predictions"], plain["predictions"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["weights"], plain["weights"], rtol=1e-4, atol=1e-6)
    assert found["best"] == plain["best"]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        _ignore_advice()
        yield


def _ignore_advice() -> None:
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", ".*(Checkpoint directory|LeafSpec).*")


def test_a_script_under_unequal_shares_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    """Its checkpoints are Lightning's own: other ranks, a pipeline, and plain Lightning go on with them."""
    plain = script(str(tmp_path / "plain"), gradient_clip_val=0.5)
    options = {"folder": str(tmp_path / "ranks"), "gradient_clip_val": 0.5}
    for found in pool.run(3, on_ranks, graph(), data_plan([[5], [2], [1]]), options, {}, timeout_s=200):
        require_equal(found, plain, ["largest"])
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in (tmp_path / "ranks").iterdir()} == names

    kept = tmp_path / "ranks" / "epoch=1.ckpt"
    options["resume"] = str(kept)
    _keep_alone(kept)
    for found in pool.run(2, on_ranks, graph(), pipeline_plan(), options, {}, timeout_s=200):
        require_equal(found, plain, ["largest", "right"], since=2)
    _keep_alone(kept)
    require_equal(script(**options), plain, since=2)


def _keep_alone(checkpoint: Path) -> None:
    for path in checkpoint.parent.iterdir():
        if path != checkpoint:
            path.unlink()


def test_a_step_that_no_graph_can_hold_is_run_as_it_is(pool: Pool, tmp_path: Path) -> None:
    """Two batches make a step; the first of them has no loss yet."""
    options = {"kind": Annealed, "size": GLOBAL // 2, "accumulate_grad_batches": 2}
    plain = script(str(tmp_path / "plain"), **options)
    halves = iter(plain["losses"])
    plain["losses"] = [(one + two) / 2 for one, two in zip(halves, halves, strict=True)]
    plan = plan_of(opaque_graph(), cluster_of(2), [[3, 2], [3]])
    options["folder"] = str(tmp_path / "ranks")
    by_samples = {"loss": LossOptions(loss_count="samples")}
    for found in pool.run(2, on_ranks, opaque_graph(), plan, options, by_samples, timeout_s=200):
        found["losses"] = found["losses"][1::2]
        require_equal(found, plain)


def test_what_no_plan_can_honour_is_refused_with_a_way_out(tmp_path: Path) -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def on_after_backward(self) -> None:
            raise AssertionError

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    def fit(module: Any, samples: int = SAMPLES, **more: Any) -> None:
        strategy = HeterodyneStrategy(plan="data")
        quiet = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
        }
        L.Trainer(accelerator="cpu", max_epochs=1, strategy=strategy, **quiet, **more).fit(module, loader(samples, 1))

    with pytest.raises(
        HeterodyneError,
        match=r"(?s)automatic_optimization=False: .*lacks embed.weight.*overrides on_after_backward.*precision=64-true",
    ) as caught:
        fit(Manual(), precision="64-true")
    assert (
        "strategy=DDPStrategy(), of heterodyne.integrations.lightning, runs any training_step"
        in caught.value.__notes__[0]
    )
    with pytest.raises(HeterodyneError, match="algorithm=value: gradients are clipped by their global norm"):
        fit(Classifier(), gradient_clip_val=1.0, gradient_clip_algorithm="value")
    with pytest.raises(DataError, match=r"last batch of an epoch has 3 samples, the others 8.*drop_last=True"):
        fit(Classifier(), 43)
    with pytest.raises(DataError, match="an epoch has 5 batches, of which 2 make a step"):
        fit(Classifier(), accumulate_grad_batches=2)


def test_a_metric_that_sees_only_the_samples_of_a_rank_is_refused() -> None:
    class Measured(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.right = pytest.importorskip("torchmetrics").MeanMetric()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.right.update(batch[1])
            return super().training_step(batch, batch_idx)

    batch = next(iter(loader(GLOBAL, 1)))
    step = TrainingStep(Measured(), BatchForm(batch), None, (0,))
    with pytest.raises(HeterodyneError, match=r"updates the metric 'right'.*update the metric in validation_step"):
        step(**step.surroundings.form.named(batch))


def test_a_batch_may_be_nested() -> None:
    a, b = torch.ones(2, 3), torch.zeros(2)
    form = BatchForm({"x": [a, {"y": b}], "w": b})
    assert form.batch(form.named({"w": b, "x": [b, {"y": a}]})) == {"w": b, "x": [b, {"y": a}]}
    assert list(BatchForm({"ids": a, "at": b}).named({"at": b, "ids": a})) == ["at", "ids"]
    with pytest.raises(DataError, match="batch_1 of the batch is a str"):
        BatchForm((a, "name"))
    with pytest.raises(DataError, match="nested in another way"):
        form.named((a, b))
