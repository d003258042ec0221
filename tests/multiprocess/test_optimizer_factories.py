"""A function that makes an optimizer may ask for layers by name, also on ranks that hold some of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import SAMPLES, Labelled, batch_of, graph, loss_of, plans, start

STEPS, BAR = 4, 1e-5


def by_layer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """A rate for each layer, which it asks for by name."""
    named = dict(named_parameters)
    layers = [[p for name, p in named.items() if f"layers.{number}." in name] for number in (0, 1, 3)]
    rates = [{"params": [named["head.weight"]], "lr": 0.1}, *({"params": of, "lr": 0.3} for of in layers)]
    return torch.optim.SGD(rates, momentum=0.9)


def test_groups_that_ask_for_layers_by_name_are_made_where_a_rank_has_some(pool: Pool) -> None:
    model = Labelled()
    optimizer = by_layer(model.named_parameters())
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        found = loss_of(model(batch_of(SAMPLES, number)[0]), batch_of(SAMPLES, number)[1])
        found.backward()
        optimizer.step()
        losses.append(found.item())
    for name in ("1F1B", "split"):
        for got in pool.run(3, stepped, graph(), plans()[name]):
            assert got == pytest.approx(losses, rel=BAR)


def stepped(world: World, found: ModelGraph, plan: Plan) -> list[float]:
    with start(world, Labelled(), plan, found, optimizer=by_layer) as trainer:
        return [trainer.step(batch_of(SAMPLES, number)).loss for number in range(STEPS)]
