"""Measuring what capture gives: a real model, its blocks, and itself in one piece."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.api.measured_draws import MeasuredDraws
from heterodyne.api.measuring import lone_steps
from heterodyne.cluster import BlockSample
from heterodyne.errors import MeasureError
from heterodyne.frontend import Captured, loss_of, trace
from heterodyne.graph.ir import Block
from heterodyne.job import OptimizerSection
from heterodyne.measure import Sampling, WholeModel
from heterodyne.measure.kernels import measure_blocks
from heterodyne.measure.workbench import Workbench
from pure.build import cluster

CPU = torch.device("cpu")
BENCH = Workbench(device=CPU, sampling=Sampling(warm_up=0, sample_s=0, samples=1, section_s=0, most_samples=1))
SIZES = (1, 2, 5)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer(16) for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    ids = torch.arange(3 * 12).view(3, 12)
    return {"ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def captured(model: Model, batch: dict[str, Tensor]) -> Captured:
    return trace(model, batch)


@pytest.fixture(scope="module")
def profile(model: Model, batch: dict[str, Tensor], captured: Captured) -> dict[str, tuple[BlockSample, ...]]:
    graph = captured.graph
    whole = captured.block(Block(index=0, name="*", kind="*", start=0, stop=len(graph.ops)))
    eager = WholeModel(
        build=lambda device: copy.deepcopy(model).to(device), inputs=graph.inputs, example=batch, loss=loss_of
    )
    programs = {kind: captured.block(block) for kind, block in graph.kinds.items()}
    # By names of their own, so that they are measured at every size; the kind * is measured at one.
    return measure_blocks({**programs, "whole": whole, "eager": eager}, SIZES, BENCH)


@pytest.mark.parametrize("place", range(len(SIZES)))
def test_blocks_keep_together_what_the_model_keeps_and_what_its_graph_says(
    captured: Captured, profile: dict[str, tuple[BlockSample, ...]], place: int
) -> None:
    graph = captured.graph
    blocks = sum(profile[block.kind][place].saved_bytes for block in graph.blocks)
    assert blocks == profile["whole"][place].saved_bytes
    assert profile["eager"][place].saved_bytes == pytest.approx(blocks, rel=0.01)
    assert graph.bytes_saved()(SIZES[place]) == pytest.approx(blocks, rel=0.01)


def test_alike_layers_are_measured_once(captured: Captured, profile: dict[str, tuple[BlockSample, ...]]) -> None:
    assert len(profile) < len(captured.graph.blocks) + 2
    assert all(s.forward_s > 0 and s.backward_s > 0 for samples in profile.values() for s in samples)


@pytest.mark.parametrize("named", [True, False])
def test_a_batch_of_any_size_is_made_of_the_samples_of_the_example(
    model: Model, batch: dict[str, Tensor], captured: Captured, named: bool
) -> None:
    example = batch if named else tuple(batch.values())
    whole = WholeModel(build=lambda _: model, inputs=captured.graph.inputs, example=example, loss=loss_of)
    module, (ids, labels) = whole.instantiate(7, CPU)
    assert torch.equal(ids, batch["ids"][[0, 1, 2, 0, 1, 2, 0]])
    assert torch.equal(labels, ids)
    torch.testing.assert_close(module(ids, labels), model(ids, labels)["loss"])


@pytest.mark.parametrize("named", [True, False])
def test_an_example_of_another_model(batch: dict[str, Tensor], captured: Captured, named: bool) -> None:
    example = {"ids": batch["ids"]} if named else [batch["ids"]]
    whole = WholeModel(build=lambda _: Model(), inputs=captured.graph.inputs, example=example, loss=loss_of)
    with pytest.raises(MeasureError, match=r"1 tensors \(ids\), the model the inputs ids, labels"):
        whole.instantiate(1, CPU)


def test_dropout_is_measured_as_training_draws_it() -> None:
    """A block draws the masks of the samples, which are the same each time, and keeps them as the runtime does: as wide as its values."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seen = nn.Linear(8, 8), list[Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(F.dropout(self.linear(x), 0.5))
            return self.seen[-1]

    class Program:
        module = Dropped()

        def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, list[Tensor]]:
            del seed
            return self.module, [torch.ones(batch, 16, 8, device=device)]

    bench = replace(BENCH, around=MeasuredDraws(CPU))
    (sample,) = measure_blocks({"dropped": Program()}, [3], bench)["dropped"]
    of_linear, mask = 3 * 16 * 8 * 4, 3 * 16 * 8 * 4
    assert sample.saved_bytes == of_linear + mask
    first, *others = Program.module.seen
    assert (first == 0).any()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_lone_steps_train_a_copy_of_the_model(model: Model, batch: dict[str, Tensor], captured: Captured) -> None:
    made: list[Model] = []

    def build(device: torch.device) -> Model:
        made.append(copy.deepcopy(model).to(device))
        return made[-1]

    whole = WholeModel(build=build, inputs=captured.graph.inputs, example=batch, loss=loss_of)
    session: Any = SimpleNamespace(cluster=cluster(1), rank=0, device=CPU)
    steps = lone_steps(session, captured, whole, optimizer=OptimizerSection(lr=1e-2), precision="fp32")
    before = loss_of(model(**batch)).item()
    with steps(3) as train:
        for _ in range(3):
            train()
    assert loss_of(made[0](**batch)).item() < before
    assert loss_of(model(**batch)).item() == before
