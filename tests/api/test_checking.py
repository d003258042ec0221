"""The model is compared with itself before anything is measured, once, and people are told what came of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import heterodyne as hd
from heterodyne.api.checking import Verdict, check_everywhere, require_exact
from heterodyne.api.optimizer_reach import OptimizerReach
from heterodyne.api.settings import Settings
from heterodyne.errors import PlanError, VerifyError
from heterodyne.frontend import loss_of, trace
from heterodyne.graph.task_graphs import TaskGraph
from heterodyne.job import OptimizerSection, ParallelismSection
from heterodyne.measure.whole_model import WholeModel
from heterodyne.plan.capabilities import (
    CUTTING,
    FEATURES,
    TRAITS,
    Capabilities,
    Feature,
    Trait,
    asked_by,
    runs_at_all,
    uses,
)
from pure.plan.kinds import ABLE, plan_with


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(self.norm(x)).squeeze(-1) - y).pow(2).mean()


@torch.library.custom_op("heterodyne_tests::less_the_first", mutates_args=())
def less_the_first(x: Tensor) -> Tensor:
    return x - x[:1]


@less_the_first.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


less_the_first.register_autograd(lambda _, g: torch.cat([g[:1] - g.sum(0, keepdim=True), g[1:]]))


class Neighbours(Small):
    """Each sample reads the first of its part of a batch, through an op that nothing is known of."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (less_the_first(self.layers[0](x)) - y[:, None]).pow(2).mean()


BATCH = {"x": torch.randn(6, 4), "y": torch.randn(6)}


def checked(model: nn.Module, budget_s: float = 10.0, *, weightless: bool = False) -> Verdict:
    """As `distribute` does it."""
    captured = trace(model, BATCH)
    whole = WholeModel(
        build=lambda _: copy.deepcopy(model),
        inputs=captured.graph.inputs,
        example=BATCH,
        loss=loss_of,
        weightless=weightless,
    )
    with hd.open_session() as session:
        return check_everywhere(session, captured, whole, budget_s=budget_s)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_model_is_checked_once_with_one_line_and_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(7)
    model = Small()
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    checked(model)
    (line,) = capsys.readouterr().err.splitlines()
    assert "the module and its graph cut in two give the loss and 6 gradients of one plain call" in line
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert checked(Small()).line == f"{line}, as found before"
    hooked = Small()
    hooked.layers[0].register_forward_hook(lambda *_: None)
    assert "as found before" not in checked(hooked).line, "it may have another backward, though its ops are the same"


def test_a_model_that_is_not_itself_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(
        VerifyError, match=r"Neighbours gives something else .* the loss \(test_checking.py:\d+\)"
    ) as caught:
        hd.distribute(Neighbours(), BATCH)
    assert "Parts must add up to the whole" in str(caught.value)
    assert "measuring" not in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


def test_what_cannot_be_checked_is_told_and_not_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "it takes" in checked(Small(), 1e-9).line
    assert "it has no weights yet" in checked(Small(), weightless=True).line
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all("'heterodyne verify' compares steps of a job" in line for line in told)
    assert not list(tmp_path.rglob("*.json"))


def settings_of(able: Capabilities, strategy: str) -> Settings:
    return Settings(
        global_batch_size=4,
        precision="fp32",
        optimizer=OptimizerSection(),
        parallelism=ParallelismSection(strategy=strategy).model_copy(  # type: ignore[arg-type]
            update={"asynchronous": "predicted" if able.asynchronous else None}
        ),
        reach=OptimizerReach(reach=able.reach, name="Muon"),
        module_only=able.module_only,
    )


@pytest.mark.parametrize("trait", TRAITS, ids=lambda trait: trait.name)
def test_what_the_optimizer_or_the_check_refuses_is_refused_in_their_words(trait: Trait) -> None:
    """Every plan and every strategy that the table refuses for them; why the model itself refuses any is said elsewhere."""
    able = ABLE[trait.name]
    words = {
        "optimizer": (PlanError, "Muon needs"),
        "check": (VerifyError, f"cuts the model. {able.module_only}"),
        "job": (PlanError, "does not go with parallelism.async: predicted"),
    }

    def refused(features: Iterable[Feature]) -> AbstractContextManager[object]:
        if trait.of == "model" or able.allow(*features):
            return nullcontext()
        error, told = words[trait.of]
        return pytest.raises(error, match=re.escape(told))

    for feature in FEATURES:
        given = plan_with(feature, able.graph)
        features = {use.feature for use in uses(given)}
        if all(map(runs_at_all, features)):
            with refused(features):
                require_exact(settings_of(able, "auto"), able.graph, given)
    marked = replace(able.graph, task_graphs=(TaskGraph(name="head", kind="split", device_count=2, source="net.py:3"),))
    for strategy in ("auto", "data", "equal", "fastest", *CUTTING):
        for graph in (able.graph, marked):
            with refused(asked_by(strategy, graph)):
                require_exact(settings_of(able, strategy), graph, None)


def test_where_only_the_graph_is_wrong_what_cuts_it_is_named() -> None:
    able = ABLE["a model whose graph a check has refused"]
    with pytest.raises(VerifyError, match=r"the strategy 'pipeline' cuts the model\. its graph cut in two is another"):
        require_exact(settings_of(able, "pipeline"), able.graph, None)
    with pytest.raises(VerifyError, match="the plan cuts the model"):
        require_exact(settings_of(able, "auto"), able.graph, plan_with("several_stages", able.graph))
