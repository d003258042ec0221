"""Training with clipping, dropout and AdamW on accelerators goes where it goes on one CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from device.test_exactness import CPU, A, B
from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime.exact.verify import compare
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.test_training_pipelines import (
    SAMPLES,
    STEPS,
    Spread,
    chain,
    in_parts,
    train,
    train_on_one_device,
    whole,
    worker_under,
)
from multiprocess.work import copied


@functools.cache
def on_one_device(spread: Any) -> tuple[list[float], list[float], dict[str, Tensor]]:
    graph = captured("gpt2")
    return train_on_one_device(graph, spread(graph))


@pytest.mark.parametrize("devices", [(A, A, A, A), (A, B, CPU, A)], ids="+".join)
@pytest.mark.parametrize("spread", [whole, chain, in_parts])
def test_ten_steps_are_those_of_one_device(pool: Pool, spread: Any, devices: tuple[str, ...]) -> None:
    graph = captured("gpt2")
    expected_losses, expected_norms, expected = on_one_device(spread)
    for losses, norms, state, _ in pool.run(4, train, graph, spread(graph), STEPS, devices=devices):
        assert losses[:5] == pytest.approx(expected_losses[:5], rel=1e-5)
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        assert norms == pytest.approx(expected_norms, rel=1e-3)
        assert compare(0.0, state, 0.0, expected).largest <= 1e-3


def asked_for_its_state(world: World, graph: ModelGraph, spread: Spread) -> tuple[list[str], dict[str, Tensor]]:
    """Which weights that this rank trains are changed by asking for the state; and the state."""
    worker = worker_under(world, build(graph, SAMPLES), spread)
    worker.step(build(graph, SAMPLES).batch)
    held = {name: tensor for name, tensor in worker.module.named_parameters() if not tensor.is_meta}
    with torch.no_grad():
        for tensor in held.values():
            tensor.mul_(1 + 1e-6 * world.rank)  # as if this device had rounded in another way
    before = copied(held)
    found = copied(worker.state.state_dict()["model"])
    worker.state.own()
    after = copied(held)
    worker.close()
    trains = worker.placement.places[world.rank].micro_batches.samples
    return [n for n in held if trains and not torch.equal(before[n], after[n])], found


@pytest.mark.parametrize("spread", [whole, chain])
def test_a_checkpoint_changes_no_weight(pool: Pool, spread: Any) -> None:
    graph = captured("gpt2")
    found = pool.run(4, asked_for_its_state, graph, spread(graph), devices=(CPU, A, CPU, A))
    for changed, state in found:
        assert not changed
        assert all(torch.equal(state[name], value) for name, value in found[0][1].items()), "all have the keeper's"
