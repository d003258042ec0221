"""Scripts of Transformers' Trainer on unequal shares: what they log, write and return is that of one process with the global batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

pytest.importorskip("accelerate")
import transformers
from accelerate import state
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from heterodyne.integrations.huggingface import Trainer, UnequalSharesMixin
from multiprocess.pool import Pool, World

RANKS, GLOBAL, SAMPLES, HELD_OUT = 3, 12, 38, 14  # the last batches have fewer samples than there are ranks
SHARES = [1.0, 2.0, 5.0]
SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}


class Texts(Dataset[dict[str, Any]]):
    """Padded rows with unlike numbers of labels."""

    def __init__(self, samples: int, classes: bool) -> None:
        self.samples, self.classes = samples, classes

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 20, (6,), generator=draw)
        length = 2 + index % 5
        mask = (torch.arange(6) < length).long()
        labels = ids.sum() % 3 if self.classes else ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


class Normed(nn.Module):
    """Takes no more than its inputs, and compares samples by BatchNorm; its loss is a mean over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.head((self.words(input_ids) * attention_mask[..., None]).mean(1))
        return {"logits": scores} if labels is None else {"loss": F.cross_entropy(scores, labels), "logits": scores}


def language() -> nn.Module:
    sizes: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def masked() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SMALL, **NO_DROPOUT))


def classified() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**SMALL, **NO_DROPOUT))


def by_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    scores = outputs["logits"][:, :-1].reshape(-1, 20)
    return F.cross_entropy(scores, labels[:, 1:].reshape(-1), reduction="sum") / float(num_items_in_batch)


def by_samples(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels, reduction="none").mean()


class OwnLoss(transformers.Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


class MixedIn(UnequalSharesMixin, OwnLoss):
    pass


MODELS: dict[str, Callable[[], nn.Module]] = {
    "items": language,
    "own items": language,
    "smoothed items": language,
    "items of a function": language,
    "tokens": masked,
    "smoothed tokens": masked,
    "samples": Normed,
    "samples of a model that takes items": classified,
    "samples of a function": Normed,
    "a loss of one's own": classified,
}
"""What the loss divides by."""
OPTIONS: dict[str, dict[str, Any]] = {
    "own items": {"average_tokens_across_devices": False},
    "smoothed items": {"label_smoothing_factor": 0.1},
    "smoothed tokens": {"label_smoothing_factor": 0.1},
}
FUNCTIONS = {"items of a function": by_items, "samples of a function": by_samples}


def hits(predictions: Any) -> dict[str, float]:
    scores = predictions.predictions[0] if isinstance(predictions.predictions, tuple) else predictions.predictions
    return {"hits": float((np.asarray(scores).argmax(-1) == predictions.label_ids).sum())}


@contextmanager
def launched(world: World) -> Iterator[None]:
    """The environment of a torchrun, with nothing left behind in the worker."""
    said = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.world_size, "MASTER_PORT": 1}
    named = {name: str(each) for name, each in said.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, named if world.world_size > 1 else {}):
        try:
            yield
        finally:
            state.AcceleratorState._reset_state(True)
            state.GradientState._reset_state()


def arguments(world: World, folder: str, **more: Any) -> transformers.TrainingArguments:
    given: dict[str, Any] = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,  # the last window of an epoch has one batch
        "learning_rate": 0.02,
        "adam_epsilon": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "include_num_input_tokens_seen": "all",
    }
    sizes = {f"per_device_{each}_batch_size": GLOBAL // world.world_size for each in ("train", "eval")}
    return transformers.TrainingArguments(folder, **{**given, **sizes, **more})


def trainer_of(world: World, kind: str, folder: str, trainer: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind]()
    classes = not isinstance(model, GPT2LMHeadModel | BertForMaskedLM)
    own, several = kind == "a loss of one's own", world.world_size > 1
    made: Any = trainer or ((MixedIn if own else Trainer) if several else (OwnLoss if own else transformers.Trainer))
    return made(
        model=model,
        args=arguments(world, folder, **{**OPTIONS.get(kind, {}), **more}),
        train_dataset=Texts(SAMPLES, classes),
        eval_dataset=Texts(HELD_OUT, classes),
        compute_metrics=hits,
        compute_loss_func=FUNCTIONS.get(kind),
        **({"shares": SHARES} if several else {}),
    )


def seen(trainer: Any, result: Any, predicted: Any) -> dict[str, Any]:
    timed = ("runtime", "_per_second", "flos", "preparation")
    predictions = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    return {
        "history": [
            {name: value for name, value in entry.items() if not any(word in name for word in timed)}
            for entry in trainer.state.log_history
        ],
        "loss": result.training_loss,
        "tokens": trainer.state.num_input_tokens_seen,
        "before": {name: each for name, each in predicted.metrics.items() if not any(word in name for word in timed)},
        "predictions": torch.as_tensor(predictions),
        "labels": torch.as_tensor(predicted.label_ids),
        "weights": {name: each.detach().clone() for name, each in trainer.model.state_dict().items()},
    }


def script(world: World, kind: str, folder: str) -> dict[str, Any]:
    """Predicts before it trains, trains twice."""
    with launched(world):
        trainer = trainer_of(world, kind, folder)
        predicted = trainer.predict(trainer.eval_dataset)
        first = trainer.train()
        history = [*trainer.state.log_history]
        trainer.args.num_train_epochs = 1
        again = trainer.train()
        found = seen(trainer, again, predicted)
        timed = ("runtime", "_per_second", "flos", "preparation")
        found["first"] = [first.training_loss, *(e["loss"] for e in history if "loss" in e)]
        found["timed"] = len(timed)
        return found


def require_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_script_is_that_of_one_process_whatever_its_loss_divides_by(pool: Pool, tmp_path: Path, kind: str) -> None:
    (wanted,) = pool.run(1, script, kind, str(tmp_path / "one"))
    for found in pool.run(RANKS, script, kind, str(tmp_path / "three")):
        for name in wanted:
            require_same(found[name], wanted[name])
