"""A script for the Trainer of Transformers under a plan: what it logs, writes and returns is that of one process."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from heterodyne.api import PlanOptions
from heterodyne.api.loop.batches import batch_format
from heterodyne.api.loop.model_with_loss import with_loss
from heterodyne.errors import CheckpointError, DataError, HeterodyneError
from heterodyne.frontend import trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import session_of
from multiprocess.work import PipelineOf, StageOf, cluster_of, plan_of, staged_plan
from pure.build import linear, profile

pytest.importorskip("accelerate")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from heterodyne.integrations.huggingface import HeterodyneArguments, HeterodyneTrainer
from heterodyne.integrations.huggingface.loss_outside import loss_outside
from heterodyne.integrations.huggingface.refusals import require_same_length

GLOBAL = 8
SHARES = ((5,), (2,), (1,))
SAMPLES = 2 * GLOBAL * 4 + 3  # the last batch of an epoch is smaller
STEPS = 12


def model_of() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def data(samples: int = SAMPLES, seed: int = 1) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (
        4 * torch.randint(1, 5, (samples,), generator=generator)
    ).tolist()  # batches of few lengths: each is captured
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
        "lr_scheduler_type": "polynomial",  # reads the defaults of the optimizer
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "steps",
        "save_steps": 5,
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
    if isinstance(trainer, HeterodyneTrainer):
        trainer.end()
    return {
        "history": [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry],
        "loss": result.training_loss,
        "predictions": torch.as_tensor(predicted.predictions),
        "labels": torch.as_tensor(predicted.label_ids),
        "calls": calls.calls,
        "best": Path(trainer.state.best_model_checkpoint or "").name,
        "weights": {name: weight.detach().clone() for name, weight in trainer.model.state_dict().items()},
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
            distribution={"plan": PlanOptions(plan, profile=known), "session": session},
        )


@functools.cache
def graph(smoothing: float = 0.0, even: bool = False) -> ModelGraph:
    """Of the batch that the Trainer begins with: the plans below are made for it."""
    options = options_of(tempfile.gettempdir(), save_strategy="no", label_smoothing_factor=smoothing)
    args = HeterodyneArguments(global_batch_size=GLOBAL, **options)
    trainer = HeterodyneTrainer(
        model_of(),
        args,
        data_collator=collated,
        train_dataset=even_rows() if even else data(),
        eval_dataset=data(11, 2),
    )
    batch = trainer._batch(next(iter(trainer.get_train_dataloader())))
    loss, module = loss_outside(trainer), trainer.model.train()
    if loss is not None:
        module = with_loss(module, loss, batch_format(module, batch, has_loss=True), batch, withheld=("labels",))
    return trace(module, batch, name=type(trainer.model).__name__).graph


def data_plan(shares: Sequence[Sequence[int]] = SHARES) -> Plan:
    return plan_of(graph(), cluster_of(len(shares)), shares)


def pipeline_plan(found: ModelGraph) -> Plan:
    cut = max(number for number, op in enumerate(found.ops) if "transformer.h.0" in op.module) + 1
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
    torch.testing.assert_close(found["weights"], plain["weights"], rtol=1e-4, atol=1e-6)
    assert (found["calls"], found["best"]) == (plain["calls"], plain["best"])


def saved_weights(folder: Path) -> dict[str, Tensor]:
    return dict(GPT2LMHeadModel.from_pretrained(folder).state_dict())


def plain_script(folder: Path, resume: bool | str = False, **more: Any) -> dict[str, Any]:
    sizes = {"per_device_train_batch_size": GLOBAL, "per_device_eval_batch_size": 12}
    return script(Trainer, TrainingArguments(**options_of(str(folder), **sizes, **more)), resume)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("plain")
    return plain_script(folder), folder


def test_a_script_under_unequal_shares_is_that_of_one_process(
    pool: Pool, tmp_path: Path, plain: tuple[dict[str, Any], Path]
) -> None:
    expected, files = plain
    results = pool.run(3, on_ranks, graph(), data_plan(), options_of(str(tmp_path)), timeout_s=200)
    for found in results:
        require_equal(found, expected)
    torch.testing.assert_close(saved_weights(tmp_path), expected["weights"], rtol=1e-4, atol=1e-6)
    names = {path.name for path in files.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == names

    for name in ("trainer_state.json", "rng_state.pth", "scheduler.pt", "model.safetensors"):
        assert (tmp_path / "checkpoint-5" / name).exists()
    expected = plain_script(
        files, str(files / "checkpoint-5")
    )  # its collator draws again, so it is no part of the first run
    plan, options = data_plan(((3, 3), (2,))), options_of(str(tmp_path), per_device_eval_batch_size=6)
    for found in pool.run(2, on_ranks, graph(), plan, options, str(tmp_path / "checkpoint-5"), timeout_s=200):
        require_equal(found, expected, since=5)
    torch.testing.assert_close(saved_weights(tmp_path), expected["weights"], rtol=1e-4, atol=1e-6)


def test_under_a_pipeline_the_best_model_is_back_at_the_end(pool: Pool, tmp_path: Path) -> None:
    """Label smoothing stands outside of the model, and no rank holds all of it."""
    more = {
        "label_smoothing_factor": 0.1,
        "load_best_model_at_end": True,
        "max_steps": 6,
        "eval_steps": 3,
        "save_steps": 3,
    }
    more |= {"metric_for_best_model": "hits", "greater_is_better": True, "learning_rate": 0.05}
    expected = plain_script(tmp_path / "plain", **more)
    options = options_of(str(tmp_path / "ranks"), **{**more, "per_device_eval_batch_size": 6})
    for found in pool.run(2, on_ranks, graph(0.1), pipeline_plan(graph(0.1)), options, timeout_s=200):
        require_equal(found, expected)


class OnePass(IterableDataset[dict[str, list[int]]]):
    """A stream that is there once."""

    def __init__(self, rows: Sequence[dict[str, list[int]]]) -> None:
        self.rows = iter(rows)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return self.rows


class LossOfEach:
    """Adds up over the batches of an evaluation, and tells at its last."""

    def __init__(self) -> None:
        self.labels = 0

    def __call__(self, predictions: Any, compute_result: bool) -> dict[str, float]:
        self.labels += int((predictions.label_ids != -100).sum())
        found = {"labels": float(self.labels)}
        self.labels *= not compute_result
        return found


def even_rows() -> list[dict[str, list[int]]]:
    return [{"input_ids": row["input_ids"] + [3] * (16 - len(row["input_ids"]))} for row in data()]


def evaluated_and_streamed(trainer_class: Any, args: Any, **more: Any) -> list[dict[str, float]]:
    """Evaluates before it trains on a stream, with metrics batch by batch; then a second trainer of the same model trains on."""
    model, history = model_of(), []
    rows = even_rows()
    for _ in range(2):
        trainer = trainer_class(
            model=model,
            args=args,
            data_collator=collated,
            train_dataset=OnePass(rows[: 4 * GLOBAL]),
            eval_dataset=rows[:11],
            compute_metrics=LossOfEach(),
            **more,
        )
        history.append({"step": 0, **trainer.evaluate()})
        trainer.train()
        history += [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    if isinstance(trainer, HeterodyneTrainer):
        trainer.end()
    return history


def evaluated_on_ranks(world: World, found: ModelGraph, plan: Plan, options: dict[str, Any]) -> list[dict[str, float]]:
    with launched(world):
        session = session_of(world)
        known = profile(found, session.cluster, [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6)
        args = HeterodyneArguments(**options)
        given = {"plan": PlanOptions(plan, profile=known), "session": session}
        return evaluated_and_streamed(HeterodyneTrainer, args, distribution=given)


def test_a_look_at_the_data_takes_nothing_from_a_stream_nor_from_an_evaluation(pool: Pool, tmp_path: Path) -> None:
    """The batch is that of two ranks that accumulate twice, as Accelerate is told."""
    accumulate = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}
    more = {"max_steps": 4, "eval_strategy": "no", "save_strategy": "no", "batch_eval_metrics": True}
    sizes = {"per_device_train_batch_size": GLOBAL // 2, "per_device_eval_batch_size": 4}
    options = options_of(str(tmp_path), **more, **sizes)
    expected = evaluated_and_streamed(Trainer, TrainingArguments(**options, gradient_accumulation_steps=2))
    assert [entry["step"] for entry in expected] == [0, 1, 2, 3, 4] * 2
    options |= {"per_device_train_batch_size": GLOBAL // 4, "per_device_eval_batch_size": 2, **accumulate}
    found = graph(even=True)
    plan = plan_of(found, cluster_of(2), ((5,), (3,)))
    for history in pool.run(2, evaluated_on_ranks, found, plan, options, timeout_s=120):
        assert len(history) == len(expected)
        for entry, of in zip(history, expected, strict=True):
            for name in of.keys() & {"step", "loss", "grad_norm", "eval_loss", "eval_labels"}:
                assert entry[name] == pytest.approx(of[name], rel=1e-5), (name, of)


def test_accumulation_is_said_once() -> None:
    twice = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    args = HeterodyneArguments("unused", use_cpu=True, gradient_accumulation_steps=2, accelerator_config=twice)
    with pytest.raises(HeterodyneError, match="say it once, by gradient_accumulation_steps"):
        HeterodyneTrainer(model_of(), args)


def test_an_empty_dataset_is_told_before_anything_is_planned(tmp_path: Path) -> None:
    trainer = HeterodyneTrainer(
        model_of(), HeterodyneArguments(**options_of(str(tmp_path))), train_dataset=data(0), eval_dataset=data()
    )
    with pytest.raises(DataError, match="train_dataset has no samples"):
        trainer.train()


def test_a_train_dataset_of_another_length_is_refused_at_resume(tmp_path: Path) -> None:
    require_same_length(10, 10, tmp_path)
    require_same_length(None, 10, tmp_path)
    for now in (9, 11):
        with pytest.raises(
            CheckpointError, match=f"of 10 samples, and now it has {now}; .* give it the data that it began with"
        ):
            require_same_length(10, now, tmp_path)


def test_what_no_plan_can_honour_is_refused_with_a_way_out() -> None:
    with pytest.raises(HeterodyneError, match="HeterodyneArguments as TrainingArguments"):
        HeterodyneTrainer(model_of(), TrainingArguments("unused", use_cpu=True))
    args = HeterodyneArguments("unused", use_cpu=True, auto_find_batch_size=True)
    with pytest.raises(HeterodyneError, match=r"auto_find_batch_size: the planner finds"):
        HeterodyneTrainer(model_of(), args)

    class Own(HeterodyneTrainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

    with pytest.raises(HeterodyneError, match="Own overrides compute_loss: pass the loss as compute_loss_func="):
        Own(model_of(), HeterodyneArguments("unused", use_cpu=True))
    made = torch.optim.SGD(model_of().parameters())
    with pytest.raises(HeterodyneError, match="optimizers are made already"):
        HeterodyneTrainer(model_of(), HeterodyneArguments("unused", use_cpu=True), optimizers=(made, None))
