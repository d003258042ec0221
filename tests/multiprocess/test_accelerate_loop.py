"""A loop as Accelerate has them, under unequal shares and a pipeline, is that of one device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.api import PlanOptions
from heterodyne.errors import HeterodyneError
from heterodyne.frontend import trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.integrations.accelerate import Accelerator, Promise
from heterodyne.plan.plan import Plan
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import session_of
from multiprocess.work import PipelineOf, StageOf, cluster_of, plan_of, staged_plan
from pure.build import linear, profile

STEPS, CLIP = 20, 0.5


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.inner(self.embed(ids)).sum(1))
        return _Outputs(loss=F.cross_entropy(scores, labels), logits=scores)


class _Outputs(dict[str, Any]):
    @property
    def loss(self) -> Any:
        return self["loss"]


def batches() -> list[dict[str, Tensor]]:
    """Of uneven lengths."""
    made = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 20, (8, 4 + step % 3), generator=generator)
        made.append({"ids": ids, "labels": ids[:, 0] % 3})
    return made


def loop(model: nn.Module, prepare: Any, backward: Any, clip: Any) -> tuple[list[float], list[float]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer: Any = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": others}], lr=0.02, eps=1e-3
    )
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    trained, optimizer, loader, scheduler = prepare(model, optimizer, (batch for batch in batches()), scheduler)
    losses, norms = [], []
    trained.train()
    for batch in loader:
        loss = trained(**batch)["loss"] if trained is model else trained(**batch).loss
        backward(loss)
        norms.append(float(clip(trained.parameters(), CLIP)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=len(losses) % 2 == 0)
        losses.append(loss.item())
    return losses, norms


@functools.cache
def graph() -> ModelGraph:
    return trace(Classifier(), batches()[0], name="Classifier").graph


def plans() -> dict[str, Plan]:
    found, here = graph(), cluster_of(3)
    cut = next(number for number, op in enumerate(found.ops) if "tanh" in op.target) + 1
    stages = (StageOf(cut, (0,), (1,)), StageOf(len(found.ops), (1,), (1,)))
    return {
        "data": plan_of(found, here, ((5,), (2,), (1,))),
        "1F1B": staged_plan(found, here, [PipelineOf((4, 4), stages)], "1F1B"),
    }


def on_ranks(world: World, found: ModelGraph, plan: Plan, folder: str) -> dict[str, Any]:
    session = session_of(world)
    known = profile(found, session.cluster, [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6)
    model, accelerator = (
        Classifier(),
        Accelerator(clip_grad_norm=CLIP, plan=PlanOptions(plan, profile=known), session=session),
    )
    kept: list[Any] = []

    def prepare(*given: Any) -> Any:
        kept.extend(accelerator.prepare(*given))
        return kept

    def clip(parameters: Any, norm: float) -> float:
        return accelerator.clip_grad_norm_(parameters, norm) or 0.0

    losses, norms = loop(model, prepare, accelerator.backward, clip)
    accelerator.save_state(folder, scheduler=kept[3].state_dict())
    assert accelerator.load_state(folder) == {"scheduler": kept[3].state_dict()}
    refused = _what_is_refused(accelerator, kept[1], folder)
    accelerator.end_training()
    assert all(p.grad is None for p in model.parameters())
    weights = {n: w.detach().clone() for n, w in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights, "refused": refused}


def _what_is_refused(accelerator: Accelerator, optimizer: torch.optim.Optimizer, folder: str) -> list[str]:
    """Gradients of two batches, and a rate after the step; the weights are those of before. An optimizer of a new process has its rates
    back from the checkpoint."""
    refused = []
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    accelerator.load_state(folder)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    accelerator.backward(Promise(batches()[0]))
    try:
        accelerator.backward(Promise(batches()[1]))
    except HeterodyneError as error:
        refused.append(str(error))
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for read in (
        lambda: nn.utils.clip_grad_value_(weights, 1.0),
        lambda: sum(p.grad.norm() for p in weights if p.grad is not None),
        lambda: accelerator.clip_grad_value_(weights, 1.0),
    ):
        try:
            read()
        except HeterodyneError as error:
            refused.append(str(error))
    optimizer.param_groups[0]["lr"] *= 2
    try:
        optimizer.step()
    except HeterodyneError as error:
        refused.append(str(error))
    accelerator.load_state(folder)
    return refused


@pytest.mark.parametrize("name", ["data", "1F1B"])
def test_a_loop_of_accelerate_is_that_of_one_device(pool: Pool, tmp_path: Path, name: str) -> None:
    model = Classifier()
    losses, norms = loop(
        model,
        lambda *given: given,
        lambda loss: loss.backward(),
        lambda p, norm: nn.utils.clip_grad_norm_(p, norm).item(),
    )
    for rank, found in enumerate(pool.run(3, on_ranks, graph(), plans()[name], str(tmp_path))):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        twice, clamped, read, by_value, late = found["refused"]
        assert "calls clamp_ on a gradient after accelerator.backward(loss)" in clamped
        assert "calls norm on a gradient" in read
        assert "clips gradients by value, at 1, after accelerator.backward(loss)" in by_value
        assert "gradients of several batches are not accumulated" in twice
        assert "change them before backward" in late
        torch.testing.assert_close(found["weights"], dict(model.state_dict()), rtol=1e-5, atol=1e-6)
        if rank == 0:
            assert found["norms"] == pytest.approx(norms, rel=1e-5)


def test_what_a_promise_cannot_give_is_refused() -> None:
    promise = Promise(batches()[0])
    for wrong in (lambda: promise / 4, lambda: promise.logits, lambda: F.cross_entropy(promise, torch.ones(1))):
        with pytest.raises(HeterodyneError, match=r"with the model's own loss: let forward return the whole loss"):
            wrong()
    with pytest.raises(HeterodyneError, match="read it after that"):
        promise.item()
    model = Classifier()

    class Forgetful(torch.optim.SGD):
        def __init__(self, params: Any, momenta: float) -> None:
            super().__init__(params, momentum=momenta)

    with pytest.raises(HeterodyneError, match=r"Forgetful cannot be made again .* keep its momenta in its groups"):
        Accelerator().prepare(model, Forgetful(model.parameters(), 0.9), batches())
