"""One's own loop: what `distribute` makes of a model and an example, on the one device of this process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import heterodyne as hd
from heterodyne.errors import DataError, HeterodyneError, PlanError


class Scaled(nn.Module):
    """Its first input is one for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, scale: Tensor, points: Tensor, targets: Tensor) -> Tensor:
        return (self.layers(points * scale).squeeze(-1) - targets).pow(2).mean()


def batch_of(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    points = torch.randn(samples, 4, generator=generator)
    return {"scale": torch.tensor([2.0]), "points": points, "targets": points.sum(1)}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)  # type: ignore[arg-type]


def test_a_loop_of_ones_own_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Scaled()
    plain = copy.deepcopy(model)
    batches = [batch_of(6) for _ in range(3)]
    with hd.distribute(
        model, batches[0], optimizer=sgd, plan=hd.PlanOptions(micro_batch_sizes=(1, 2, 4), measure_s=0.05)
    ) as trainer:
        assert trainer.plan.global_batch_size == 6, "the samples, not what the first input has in its first dim"
        losses = [trainer.step(batch).loss for batch in batches]
        kept = trainer.plan
        assert trainer.module is model
        assert trainer.explain()
        assert trainer.predicted() is not None
        assert trainer.measured() is not None
        validation = trainer.evaluate(batch_of(5))
        with pytest.raises(DataError, match=r"is float64, that of the example was float32: convert it"):
            trainer.step({n: v.double() if v.is_floating_point() else v for n, v in batches[0].items()})
    with pytest.raises(HeterodyneError, match="the trainer is closed"):
        trainer.step(batches[0])
    optimizer = sgd(plain.parameters())
    for batch, loss in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        expected = plain(**batch)
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert validation == pytest.approx(plain(**batch_of(5)).item(), rel=1e-5)

    kept.save(tmp_path / "plan.json")
    with hd.distribute(
        Scaled(), batches[0], optimizer=sgd, plan=hd.PlanOptions(tmp_path / "plan.json", measure_s=0.05)
    ) as again:
        assert again.plan.pipelines == kept.pipelines
        with pytest.raises(DataError, match="has 5 samples, the plan was made for 6"):
            again.step(batch_of(5))


def test_what_distribute_does_can_be_done_by_itself(tmp_path: Path) -> None:
    """The plan found from a profile is the one that `distribute` finds with it, and the timeline is as long as it was predicted."""
    model, batch, loss = (
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)),
        (torch.randn(6, 8), torch.randn(6, 1)),
        nn.MSELoss(),
    )
    with hd.open_session() as session:
        graph = hd.capture(model, batch, loss=loss)
        profile = hd.measure_model(model, batch, loss=loss, plan=hd.PlanOptions(measure_s=0.05), session=session)
        plan = hd.find_plan(graph, session.cluster, profile, global_batch_size=6)
        for asked in ("auto", plan):
            options = hd.PlanOptions(asked, profile=profile)
            with hd.distribute(model, batch, loss=loss, plan=options, clip_grad_norm=1.0, session=session) as trainer:
                assert trainer.plan.pipelines == plan.pipelines
        (tmp_path / "plan.json").write_text(plan.dump())
        timeline = hd.simulate_plan(tmp_path / "plan.json", graph, session.cluster, profile)
    assert plan.predicted is not None
    first, second = (max(event.end_s for event in timeline.events if event.step == step) for step in (0, 1))
    assert second - first == pytest.approx(plan.predicted.step_s)
    with pytest.raises(HeterodyneError, match="strategy is 'quickest', not one of auto"):
        hd.find_plan(graph, session.cluster, profile, global_batch_size=6, strategy="quickest")  # type: ignore[arg-type]
    with pytest.raises(HeterodyneError, match="cluster is None; it is a Cluster"):
        hd.find_plan(graph, None, profile, global_batch_size=6)  # type: ignore[arg-type]


def test_a_plan_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(HeterodyneError, match=r"neither auto, .*, fastest nor a file"):
        hd.distribute(Scaled(), batch_of(4), plan="quickest")
    with pytest.raises(PlanError, match="async goes with strategy pipeline, not with data"):
        hd.distribute(Scaled(), batch_of(4), plan=hd.PlanOptions("data", asynchronous="predicted"))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError, match="plan version None"):
        hd.distribute(Scaled(), batch_of(4), plan=tmp_path / "plan.json")


def test_batch_norm_over_samples_alone_is_measured_with_two() -> None:
    """Of one sample it has no statistics, and micro-batches of one are among those that are measured if nothing is said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    plain, batch = copy.deepcopy(model), (torch.randn(6, 4), torch.randn(6, 1))
    with hd.distribute(
        model, batch, loss=nn.MSELoss(), optimizer=sgd, plan=hd.PlanOptions(measure_s=0.05, rehearsal_s=0)
    ) as trainer:
        sizes = trainer.plan.pipelines[0].micro_batches.sizes
        parts = zip(*(part.split(sizes) for part in batch), sizes, strict=True)
        one_device = sum(nn.functional.mse_loss(plain(x), y).item() * size / 6 for x, y, size in parts)
        assert min(sizes) > 1
        assert trainer.step(batch).loss == pytest.approx(one_device, rel=1e-5)


def test_a_trainer_that_is_not_closed_ends_with_its_session() -> None:
    model, batch = Scaled(), batch_of(6)
    before = copy.deepcopy(model.state_dict())
    with hd.open_session() as session:
        trainer = hd.distribute(model, batch, optimizer=sgd, plan=hd.PlanOptions(measure_s=0.05), session=session)
        trainer.step(batch)
    with pytest.raises(HeterodyneError, match="the trainer is closed"):
        trainer.step(batch)
    assert not session.inside
    assert not torch.equal(model.state_dict()["layers.0.weight"], before["layers.0.weight"])
