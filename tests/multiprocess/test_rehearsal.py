"""A rehearsal in real processes: it is told, and leaves no trace in the run that follows."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heterodyne as hd
from heterodyne.api import preparation, rehearsal
from heterodyne.graph.ir import ModelGraph
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import session_of
from pure.build import linear, profile

SAMPLES, STEPS = 8, 6


class Dropping(nn.Module):
    """With random numbers, of which a rehearsal must not take any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


def made() -> tuple[Dropping, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Dropping(), {"x": torch.randn(SAMPLES, 8), "y": torch.randn(SAMPLES, 8)}


def trained(world: World, graph: ModelGraph, plan: str | Path, run: Path) -> tuple[list[float], dict[str, Tensor], str]:
    """Losses, weights, and what is said of the plan. Whatever the machine does, some plans are predicted to take about as long."""
    model, batch = made()
    session = session_of(world)
    known = profile(graph, session.cluster, [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6)
    options = hd.PlanOptions(plan, micro_batch_sizes=[1, 2], rehearsal_s=60.0, check_s=0)
    with (
        mock.patch.object(preparation, "measure_everywhere", return_value=known),
        mock.patch.multiple(rehearsal, _TURN_S=0.01, _MOST_TURNS=5),
        hd.distribute(model, batch, optimizer=sgd, plan=options, run=run, session=session) as trainer,
    ):
        losses = [trainer.step(batch).loss for _ in range(STEPS)]
        return losses, {name: t.clone() for name, t in trainer.state_dict()["model"].items()}, trainer.explain()


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_a_rehearsed_run_is_that_of_its_plan_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    graph = hd.capture(*made())
    rehearsed, given = tmp_path / "rehearsed", tmp_path / "given"
    found = pool.run(2, trained, graph, "auto", rehearsed)
    candidates = json.loads((rehearsed / "candidates.json").read_text())
    assert sum("in rehearsal" in candidate["why"] for candidate in candidates) > 1
    again = pool.run(2, trained, graph, rehearsed / "plan.json", given)
    assert "in rehearsal" not in (given / "candidates.json").read_text()
    assert "In rehearsal it took" in " ".join(found[0][2].split())
    for (losses, weights, _), (of_plan, weights_of_plan, _) in zip(found, again, strict=True):
        assert losses == of_plan
        assert all(torch.equal(weights[name], weights_of_plan[name]) for name in weights_of_plan)
