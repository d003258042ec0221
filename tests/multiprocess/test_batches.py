"""Forty steps on data of uneven lengths, read ahead, gone on with by other ranks in the middle: the losses of one plain process."""

from __future__ import annotations

import functools
import multiprocessing
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heterodyne as hd
from heterodyne.errors import DataError
from heterodyne.frontend import read_count, trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.lower import lower
from heterodyne.plan.plan import Plan
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.same_batch import digest, require_same
from heterodyne.runtime.worker import Worker
from multiprocess.pool import Pool, World
from multiprocess.work import Shares, cluster_of, plan_of

STEPS, BATCH, WORDS = 40, 8, 20
DICE = random.Random(0)
TEXTS = [[DICE.randrange(1, WORDS) for _ in range(DICE.randint(2, 15))] for _ in range(60)]
# 4 ranks, then 3 with shares 5 : 2 : 1, then 5: from the middle of an epoch of the texts, then from the border of one (30 * 8 = 4 * 60).
LIVES: tuple[tuple[int, Shares], ...] = (
    (17, ((2, 2), (2,), (1,), (1,))),
    (30, ((3, 2), (2,), (1,))),
    (STEPS, ((1,), (2, 1), None, (2,), (2,))),
)


class Words(nn.Module):
    """Each word is to be told from the word itself and from all words of its text: what is filled up must not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 12)
        self.mix = nn.Linear(24, 12)
        self.head = nn.Linear(12, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        mean = words.sum(1, keepdim=True) / attention_mask.sum(1)[:, None, None]
        logits = self.head(torch.tanh(self.mix(torch.cat([words, mean.expand_as(words)], -1))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Corpus:
    """Some words are left out at random, which belongs to the text and its epoch."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        words = TEXTS[index]
        return {"input_ids": [word * (random.random() < 0.8) for word in words], "labels": words}


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """To the longest of them, and a few words more are hidden at random."""
    longest = max(len(sample["labels"]) for sample in samples)
    fill = {"input_ids": 0, "labels": -100}
    found = {
        name: torch.tensor([[*s[name], *[value] * (longest - len(s[name]))] for s in samples])
        for name, value in fill.items()
    }
    hidden = torch.bernoulli(torch.full(found["input_ids"].shape, 0.1)).bool()
    found["input_ids"] = found["input_ids"].masked_fill(hidden, 0)
    return {**found, "attention_mask": (found["labels"] != -100).long()}


def full_rows(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}


def opened(kind: str, workers: int) -> hd.Batches:
    more: dict[str, Any] = {"global_batch_size": BATCH, "seed": 5, "workers": workers}
    if kind == "dataset":
        return hd.batches(Corpus(), collate=padded, lengths=[len(text) for text in TEXTS], **more)
    if kind == "packed":
        return hd.batches(TEXTS, pack_to=6, collate=full_rows, **more)
    return hd.batches(lambda: iter(TEXTS), pack_to=6, collate=full_rows, shuffle_buffer=24, **more)


@functools.cache
def graph() -> ModelGraph:
    ids = torch.ones(4, 6, dtype=torch.int64)
    return trace(Words(), {"input_ids": ids, "labels": ids, "attention_mask": ids}, name="Words").graph


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def plain(kind: str) -> list[float]:
    model = Words()
    trained = optimizer(model.parameters())
    losses = []
    for _, batch in zip(range(STEPS), opened(kind, 0), strict=False):
        trained.zero_grad()
        loss = model(**batch.samples(0, BATCH))
        loss.backward()
        trained.step()
        losses.append(loss.item())
    return losses


def counted(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def worker_of(world: World, plan: Plan, found: ModelGraph) -> Worker:
    here = cluster_of(world.world_size)
    return Worker(
        Words(),
        lowered=lower(plan, found, here),
        communicator=Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu")),
        loss_count=read_count(counted),
        optimizer=optimizer,
        total_steps=1,
    )


@dataclass(frozen=True)
class Life:
    """What a life leaves behind for the next one."""

    losses: list[float]
    model: dict[str, Any]
    data: dict[str, Any]


def live(world: World, kind: str, found: ModelGraph, plan: Plan, before: Life | None, last: int) -> Life | None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # daemons may have no children
    batches, worker = opened(kind, 1), worker_of(world, plan, found)
    if before is not None:
        worker.state.load_state_dict(before.model)
        batches.load_state_dict(before.data)
    losses = [] if before is None else before.losses
    for batch in batches:
        losses.append(worker.step(batch).loss)
        if worker.steps_done == last:
            break
    state = worker.state.state_dict()
    life = Life(losses, state, batches.state_dict()) if world.rank == 0 else None
    batches.close()
    worker.close()
    return life


@pytest.mark.parametrize("kind", ["dataset", "packed", "stream"])
def test_forty_steps_over_three_lives_are_those_of_one_process(pool: Pool, kind: str) -> None:
    found = graph()
    life = None
    for last, shares in LIVES:
        plan = plan_of(found, cluster_of(len(shares)), shares)
        life = pool.run(len(shares), live, kind, found, plan, life, last, timeout_s=200.0)[0]
    assert life is not None
    assert life.losses == pytest.approx(plain(kind), rel=1e-5)
    assert life.losses[-1] < life.losses[0]


def by_rank(world: World) -> str:
    def stream() -> Iterator[list[int]]:
        return iter(TEXTS[world.rank :: world.world_size])

    batch = next(iter(hd.batches(stream, global_batch_size=BATCH, pack_to=6)))
    with pytest.raises(DataError) as caught:
        require_same(Agreement.of_all().gather_or_raise(lambda: digest(batch)), 0, given=False)
    return str(caught.value)


def test_a_stream_that_shards_itself_by_rank_is_noticed(pool: Pool) -> None:
    assert all(
        "batches of step 0 differ: rank 1" in each and "not sharded by rank" in each for each in pool.run(2, by_rank)
    )
