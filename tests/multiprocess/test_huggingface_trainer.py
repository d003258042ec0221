"""A script for the Trainer of Transformers, under unequal shares and a pipeline: what it logs, writes and returns is that of one process."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import HeterodyneError
from heterodyne.frontend import trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import session_of
from multiprocess.work import PipelineOf, StageOf, cluster_of, plan_of, staged_plan
from pure.build import linear, profile

pytest.importorskip("accelerate")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from heterodyne.integrations.huggingface import HeterodyneArguments, HeterodyneTrainer  # noqa: E402

GLOBAL = 8
SHARES = ((5,), (2,), (1,))
SAMPLES = 2 * GLOBAL * 4 + 3  # the last batch of an epoch is smaller
STEPS = 20


def model_of() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def data(samples: int = SAMPLES, seed: int = 1) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 17, (samples,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 40, (length,), generator=generator).tolist()} for length in lengths]


def collated(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """Padded to the longest; the draw stands for a collator that masks at random."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([[*row["input_ids"], *[0] * (longest - len(row["input_ids"]))] for row in rows])
    ids[:, 0] = torch.randint(1, 40, (len(rows),))
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def hits(predictions: Any) -> dict[str, float]:
    return {"hits": float((predictions.predictions.argmax(-1) == predictions.label_ids).sum())}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(f"step {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append("evaluate")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append("save")


def options_of(folder: str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 8,
        "save_strategy": "steps",
        "save_steps": 8,
        "per_device_eval_batch_size": 4,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **more,
    }


def script(trainer_class: Any, args: Any, resume: bool | str = False, **more: Any) -> dict[str, Any]:
    """What people write, and what they look at."""
    calls = Losses()
    trainer = trainer_class(
        model=model_of(),
        args=args,
        data_collator=collated,
        train_dataset=data(),
        eval_dataset=data(11, 2),
        compute_metrics=hits,
        callbacks=[calls],
        **more,
    )
    result = trainer.train(resume_from_checkpoint=resume)
    predicted = trainer.predict(data(5, 3))
    trainer.save_model()
    return {
        "history": [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry],
        "loss": result.training_loss,
        "predictions": torch.as_tensor(predicted.predictions),
        "labels": torch.as_tensor(predicted.label_ids),
        "calls": calls.calls,
        "best": trainer.state.best_model_checkpoint,
    }


@contextmanager
def launched(world: World) -> Iterator[None]:
    """The environment of a torchrun."""
    said = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.world_size, "MASTER_PORT": 1}
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", **{name: str(v) for name, v in said.items()}}):
        yield


def on_ranks(
    world: World, graph: ModelGraph, plan: Plan, options: dict[str, Any], resume: bool | str = False
) -> dict[str, Any]:
    with launched(world):
        session = session_of(world)
        known = profile(graph, session.cluster, [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6)
        return script(
            HeterodyneTrainer,
            HeterodyneArguments(global_batch_size=GLOBAL, **options),
            resume,
            distribution={"plan": plan, "session": session, "profile": known},
        )


@functools.cache
def graph() -> ModelGraph:
    """Of the batch that the Trainer begins with: the plans below are made for it."""
    args = TrainingArguments(**options_of("unused", save_strategy="no", per_device_train_batch_size=GLOBAL))
    trainer = Trainer(model_of(), args, data_collator=collated, train_dataset=data(), eval_dataset=data(11, 2))
    (batch,), items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
    batch["num_items_in_batch"] = items
    return trace(trainer.model, batch, name=type(trainer.model).__name__).graph


def data_plan(shares: Sequence[Sequence[int]] = SHARES) -> Plan:
    return plan_of(graph(), cluster_of(len(shares)), shares)


def pipeline_plan() -> Plan:
    found = graph()
    cut = found.blocks[0].stop if hasattr(found.blocks[0], "stop") else len(found.ops) // 2
    stages = (StageOf(cut, (0,), (1,)), StageOf(len(found.ops), (1,), (1,)))
    return staged_plan(found, cluster_of(2), [PipelineOf((4, 4), stages)], "1F1B")


def require_equal(found: dict[str, Any], plain: dict[str, Any], since: int = 0) -> None:
    expected = [entry for entry in plain["history"] if entry["step"] > since]
    assert [entry["step"] for entry in found["history"] if entry["step"] > since] == [e["step"] for e in expected]
    for one, of in zip([e for e in found["history"] if e["step"] > since], expected, strict=True):
        for name in ("loss", "eval_loss", "eval_hits", "learning_rate", "epoch", "grad_norm"):
            if name in of:
                assert one[name] == pytest.approx(of[name], rel=1e-5), (name, of["step"])
    torch.testing.assert_close(found["predictions"], plain["predictions"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["labels"], plain["labels"])


def require_equal_weights(folder: Path, plain: Path) -> None:
    one, other = (GPT2LMHeadModel.from_pretrained(place).state_dict() for place in (folder, plain))
    torch.testing.assert_close(dict(one), dict(other), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("plain")
    args = TrainingArguments(**options_of(str(folder), per_device_train_batch_size=GLOBAL, per_device_eval_batch_size=12))
    return script(Trainer, args), folder


def test_a_script_under_unequal_shares_is_that_of_one_process(
    pool: Pool, tmp_path: Path, plain: tuple[dict[str, Any], Path]
) -> None:
    expected, files = plain
    results = pool.run(3, on_ranks, graph(), data_plan(), options_of(str(tmp_path)), timeout_s=200)
    for found in results:
        require_equal(found, expected)
        assert found["calls"] == expected["calls"]
    require_equal_weights(tmp_path, files)
    names = {path.name for path in files.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == names

    again = pool.run(
        2, on_ranks, graph(), data_plan(((3, 3), (2,))), options_of(str(tmp_path)), str(tmp_path / "checkpoint-8"), timeout_s=200
    )
    for found in again:
        require_equal(found, expected, since=8)
    require_equal_weights(tmp_path, files)
