"""Optimizers whose update of an element depends on its whole weight: exact where weights are whole, refused where they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from heterodyne.runtime.exact.verify import compare
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import Labelled, graph, plans, start
from multiprocess.test_training_pipelines import SAMPLES, Spread, chain, train_on_one_device, unlike, worker_under
from multiprocess.work import copied, go_on, save

STEPS = 4

Factory = Callable[..., torch.optim.Optimizer]


def adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Of the matrices; the other weights stay as they are. Its five iterations in 32 bits: those in bf16 would hide what differs."""
    return Muon32([p for p in parameters if p.dim() == 2])


class Muon32(torch.optim.SGD):
    """Muon (Jordan et al., 2024) without its bf16: momentum, made nearly orthogonal by Newton and Schulz's iteration. Its rate falls with
    the steps that its group has counted.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.02)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                x = momentum / (momentum.norm() + 1e-3)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.add_(x, alpha=-group["lr"] / group["steps"])


def in_8_bits(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torchao's AdamW, which quantizes the small weights of tests too, 16 values at a time, and runs as Python: compiling takes long."""
    from torchao.optim import AdamW8bit  # workers alone load it, and only for this

    class Quantized(AdamW8bit):  # type: ignore[misc]  # it has no types
        def _new_buffer(self, p: Tensor, signed: bool) -> Any:
            blocks = p.numel() % self.block_size == 0
            return self._subclass_zeros(p, signed, self.block_size) if blocks else torch.zeros_like(p)

        def step(self, closure: Any = None) -> Any:
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    made: torch.optim.Optimizer = Quantized(parameters, lr=0.01, block_size=16)
    return made


FACTORIES: dict[str, Factory] = {"adafactor": adafactor, "muon": muon}
if find_spec("torchao") is not None:
    FACTORIES["8 bits"] = in_8_bits


def train_in_halves(
    world: World, found: ModelGraph, spreads: tuple[Spread, Spread], factory: str, folder: Path
) -> tuple[list[float], dict[str, Tensor]]:
    """Half of the steps under one plan, the others, from a checkpoint, under another one and with a model of other weights."""
    case, other = build(found, SAMPLES), build(found, SAMPLES, seed=1)
    worker = worker_under(world, case, spreads[0], FACTORIES[factory])
    losses = [worker.step(case.batch).loss for _ in range(STEPS // 2)]
    assert worker.not_finite() is None
    save(worker, folder)
    worker.close()
    resumed = worker_under(world, other, spreads[1], FACTORIES[factory])
    go_on(resumed, folder)
    losses += [resumed.step(case.batch).loss for _ in range(STEPS // 2)]
    state = copied(resumed.state.state_dict()["model"])
    resumed.close()
    return losses, state


@pytest.mark.parametrize("factory", FACTORIES)
def test_under_pipelines_they_go_where_one_device_goes(pool: Pool, factory: str, tmp_path: Path) -> None:
    """Embeddings that are tied across stages, a stage on two devices, and a resume under two unequal pipelines."""
    found = captured("gpt2")
    spreads = chain(found), unlike(found)
    expected_losses, _, expected = train_on_one_device(found, spreads[0], STEPS, FACTORIES[factory])
    assert expected_losses[-1] < expected_losses[0]
    for losses, state in pool.run(4, train_in_halves, found, spreads, factory, tmp_path):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert compare(0.0, state, 0.0, expected).largest <= 1e-4


def refused(world: World, found: ModelGraph, plan: Plan, factory: str) -> str:
    try:
        start(world, Labelled(), plan, found, optimizer=FACTORIES[factory])
    except PlanError as error:
        return str(error)
    return "it is not refused"


@pytest.mark.parametrize("factory", FACTORIES)
def test_under_a_plan_that_splits_weights_they_are_refused_on_every_rank(pool: Pool, factory: str) -> None:
    name = {"adafactor": "Adafactor", "muon": "Muon32", "8 bits": "Quantized"}[factory]
    for message in pool.run(3, refused, graph(), plans()["split"], factory):
        assert f"{name} needs whole weights" in message
        assert "test_own_loop.py" in message, "the line that calls distribute"
        assert "take AdamW" in message
