"""Batches of ever new lengths: what is kept for them has a bound, and the user is told the remedy."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.api.stage_cutting import StageCutter
from heterodyne.frontend import trace
from heterodyne.job import OptimizerSection
from heterodyne.plan.lower import lower
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.exact.dropout import SampleDropout
from heterodyne.runtime.stages import stage_builder
from heterodyne.runtime.worker import Worker
from multiprocess.work import PipelineOf, StageOf, cluster_of, staged_plan


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.tokens(ids)).flatten(0, 1), ids.flatten())


def ids(length: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 7, (4, length))}


def test_the_latest_shapes_are_kept_and_the_remedy_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_builder, "MOST_SHAPES", 6)
    made: list[weakref.ref[stage_builder.StageRuntime]] = []
    make = stage_builder.StageBuilder._make

    def noted(self: stage_builder.StageBuilder, batch: dict[str, Tensor] | None) -> stage_builder.StageRuntime:
        parts = make(self, batch)
        made.append(weakref.ref(parts.stages))
        return parts

    monkeypatch.setattr(stage_builder.StageBuilder, "_make", noted)
    model, cluster, said = Model(), cluster_of(1), list[str]()
    captured = trace(model, ids(2))
    last = len(captured.graph.ops)
    stages = tuple(StageOf(stop=stop, ranks=(0,), shares=(1,)) for stop in (1, last))
    plan = staged_plan(captured.graph, cluster, (PipelineOf((2, 2), stages),), "GPipe")
    worker = Worker(
        model,
        lowered=lower(plan, captured.graph, cluster, clip=False),
        communicator=Communicator(rank=0, world_size=1, device=torch.device("cpu")),
        loss_count=captured.loss_count,
        optimizer=OptimizerSection(lr=0.1),
        total_steps=20,
        clip_grad_norm=0.0,
        stage_programs=StageCutter(captured, model),
        say=said.append,
    )
    for length in (2, 3, 4, 5, 6, 7, 8, 9, 3):  # 3 was dropped, and is made again
        batch = ids(length)
        expected = model(**batch).item()
        assert worker.step(batch).loss == pytest.approx(expected, rel=1e-6)
    assert len(made) == 9
    gc.collect()
    assert sum(ref() is not None for ref in made) == 6
    assert len(said) == 2
    assert "4 shapes" in said[0]
    assert "ids [6]" in said[0]
    assert "pad_to_multiple_of" in said[0]
    assert "captured again" in said[1]


def test_a_graph_of_another_length_is_let_go_when_the_next_one_comes() -> None:
    model = Model()
    captured = trace(model, ids(2))
    cutter = StageCutter(captured, model)
    refs = []
    for length in (3, 4, 5):
        stage = cutter(0, len(captured.graph.ops), (0,), ids(length))
        refs.append(weakref.ref(stage._pieces.traced))
        del stage
    gc.collect()
    assert [ref() is not None for ref in refs] == [False, False, True]


def test_positions_of_elements_are_kept_once_for_all_lengths() -> None:
    lengths = (5, 9, 2, 7, 30, 4)
    kept = SampleDropout(seed=3, device=torch.device("cpu"))
    for length in lengths:
        fresh = SampleDropout(seed=3, device=torch.device("cpu"))
        masks = []
        for dropout in (kept, fresh):
            with dropout.forward(dropout.draws(1, range(2, 4))):
                masks.append(F.dropout(torch.ones(2, length), 0.5))
        assert torch.equal(*masks)
    held = [value for value in vars(kept).values() if isinstance(value, Tensor)]
    assert sum(tensor.numel() for tensor in held) == max(lengths)
