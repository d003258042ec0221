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
from torch.utils.data import Dataset, IterableDataset

pytest.importorskip("accelerate")
import transformers
from accelerate import state
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers.trainer_pt_utils import LengthGroupedSampler

from heterodyne.errors import HeterodyneError, VerifyError
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


def trainer_of(world: World, kind: str, folder: str, trainer: Any = None, shares: Any = (), **more: Any) -> Any:
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
        **({"shares": shares or SHARES[: world.world_size]} if several and shares is not None else {}),
    )


TIMED = ("runtime", "_per_second", "flos", "preparation")


def untimed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not any(word in name for word in TIMED)}


def seen(trainer: Any, result: Any) -> dict[str, Any]:
    return {
        "history": [untimed(entry) for entry in trainer.state.log_history],
        "loss": result.training_loss,
        "tokens": trainer.state.num_input_tokens_seen,
        "weights": {name: each.detach().clone() for name, each in trainer.model.state_dict().items()},
    }


def script(world: World, kind: str, folder: str) -> dict[str, Any]:
    """Predicts before it trains, and trains twice."""
    with launched(world):
        trainer = trainer_of(world, kind, folder)
        predicted = trainer.predict(trainer.eval_dataset)
        scores = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
        first = seen(trainer, trainer.train())
        trainer.args.num_train_epochs = 1
        again = seen(trainer, trainer.train())
        return {
            "metrics": untimed(predicted.metrics),
            "predictions": torch.as_tensor(scores),
            "labels": torch.as_tensor(predicted.label_ids),
            "first": first,
            "again": again,
        }


def require_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_script_is_that_of_one_process_whatever_its_loss_divides_by(pool: Pool, tmp_path: Path, kind: str) -> None:
    (wanted,) = pool.run(1, script, kind, str(tmp_path / "one"))
    for found in pool.run(RANKS, script, kind, str(tmp_path / "three")):
        for name in wanted:
            require_same(found[name], wanted[name])


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Texts(4 * GLOBAL, classes=False)[index] for index in range(4 * GLOBAL))


class ByLength(Trainer):
    """Groups as the Trainer of three ranks does, however many there are."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        lengths = [int(row["attention_mask"].sum()) for row in map(self.train_dataset.__getitem__, range(SAMPLES))]
        return LengthGroupedSampler(GLOBAL // RANKS, lengths=lengths)


def loaded(world: World, folder: str) -> dict[str, Any]:
    """With loaders of each kind that the arguments know."""
    found = {}
    whole = {f"per_device_{each}_batch_size": GLOBAL for each in ("train", "eval")}
    kinds: dict[str, dict[str, Any]] = {
        "drop_last": {"dataloader_drop_last": True},
        "split": {"accelerator_config": {"split_batches": True}, **whole},
        "dispatched": {"accelerator_config": {"dispatch_batches": True}, "dataloader_drop_last": True},
        "stream": {"max_steps": 3, "eval_strategy": "no"},
        "lengths": {"gradient_accumulation_steps": 1},
    }
    for kind, more in kinds.items():
        dealt = world.world_size > 1 and kind not in ("dispatched", "stream")
        with launched(world):
            trainer = trainer_of(
                world,
                "items",
                folder,
                ByLength if kind == "lengths" else Trainer,
                shares=SHARES if dealt else None,
                **more,
            )
            if kind == "stream":
                trainer.train_dataset = Stream()
            found[kind] = seen(trainer, trainer.train())
            if dealt:
                assert trainer.explain() == "12 samples a step are dealt as 1, 3, 8, as they were given"
                assert len(trainer.accelerator._dealers) == 1  # those of evaluations are gone
    return found


def test_loaders_of_each_kind_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    """Streams, and what rank 0 reads for all, are dealt equally."""
    (wanted,) = pool.run(1, loaded, str(tmp_path / "one"))
    for found in pool.run(RANKS, loaded, str(tmp_path / "three")):
        for kind in wanted:
            require_same(found[kind], wanted[kind])


def resumed(world: World, folder: str, checkpoint: str | None) -> dict[str, Any]:
    saves = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_total_limit": 9,
    }
    best = {"load_best_model_at_end": True, "metric_for_best_model": "hits", "learning_rate": 0.1}
    with launched(world):
        trainer = trainer_of(world, "items", folder, Trainer, gradient_accumulation_steps=1, **saves, **best)
        found = seen(trainer, trainer.train(resume_from_checkpoint=checkpoint))
        return {**found, "best": Path(str(trainer.state.best_model_checkpoint)).name}


def test_a_run_goes_on_in_the_middle_of_an_epoch_with_other_ranks(pool: Pool, tmp_path: Path) -> None:
    one, three, two = (str(tmp_path / name) for name in ("one", "three", "two"))
    (wanted,) = pool.run(1, resumed, one, None)
    for found in pool.run(RANKS, resumed, three, None):
        require_same(
            {name: found[name] for name in found if name != "best"}, {n: wanted[n] for n in wanted if n != "best"}
        )
        assert found["best"] == wanted["best"]
    written = {path.name for path in Path(three, "checkpoint-6").iterdir()}
    assert written - {f"rng_state_{rank}.pth" for rank in range(RANKS)} | {"rng_state.pth"} == {
        path.name for path in Path(one, "checkpoint-6").iterdir()
    }
    for ranks, folder in ((RANKS, three), (2, two)):
        for found in pool.run(ranks, resumed, folder, str(Path(three, "checkpoint-6"))):
            require_same(found["weights"], wanted["weights"])
            require_same(found["history"][:-1], wanted["history"][:-1])  # the last one is of the steps of this run
            assert found["best"] == wanted["best"]


class Summed(Normed):
    """Its loss is a sum over the samples."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = super().forward(input_ids, attention_mask)["logits"]
        return {"logits": scores} if labels is None else {"loss": F.cross_entropy(scores, labels, reduction="sum")}


def trained(world: World, folder: str, model: nn.Module, shares: Any, asks: dict[str, Any]) -> None:
    args = arguments(world, folder, eval_strategy="no")
    for name, value in asks.items():
        setattr(args, name, value)
    data = Texts(12, classes=isinstance(model, Normed))
    Trainer(model, args, train_dataset=data, shares=shares).train()


def refused(world: World, folder: str) -> dict[str, str]:
    cases: dict[str, tuple[nn.Module, Any, dict[str, Any]]] = {
        "arguments": (
            Normed(),
            None,
            {"fsdp": "full_shard", "auto_find_batch_size": True, "train_sampling_strategy": "batch_rebalance"},
        ),
        "shares": (Normed(), [1.0], {}),
        "sum": (Summed(), None, {}),
    }
    found = {}
    with launched(world):
        for name, case in cases.items():
            with pytest.raises((HeterodyneError, VerifyError)) as caught:
                trained(world, folder, *case)
            found[name] = str(caught.value)
    return found


def test_what_shares_cannot_honour_is_refused_in_words(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, refused, str(tmp_path)):
        assert "fsdp: each rank holds the whole model" in found["arguments"]
        assert "set per_device_train_batch_size" in found["arguments"]
        assert "take 'group_by_length'" in found["arguments"]
        assert "one positive number for each of the 2 ranks" in found["shares"]
        assert "from two parts of them by tokens" in found["sum"]
