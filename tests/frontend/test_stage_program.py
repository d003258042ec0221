"""Stages of a cut graph: what they draw, hold and write over, and what is refused. `test_models` plays those of whole models."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from frontend.by_hand import (
    CLOSE,
    CPU,
    assert_gradients,
    assert_same_buffers,
    block_starts,
    cuts,
    eager,
    piped,
    programs_of,
)
from frontend.captured_models import captured_case
from frontend.tiny_models import fresh
from heterodyne.cluster import Cluster, Device
from heterodyne.errors import CaptureError, DataError, PlanError
from heterodyne.frontend import Captured, trace
from heterodyne.graph.cut import mixing_samples
from heterodyne.plan.check import violations
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Layout, Pipeline, Plan, Region, Stage
from heterodyne.runtime.exact.dropout import SampleDropout
from heterodyne.runtime.exact.interception import Interception

Batch = dict[str, Tensor]


class Noisy(nn.Module):
    """Dropout of several kinds, attention that drops, noise, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.frozen = nn.Dropout(0.5).eval()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = F.dropout2d(F.relu(self.norm(self.inward(x))), 0.3, self.training)
        h = h.flatten(2).transpose(1, 2)
        h = h + self.attention(h, h, h, need_weights=False)[0] * (torch.rand(len(h), 1, 1) + 0.5)
        h = F.dropout(self.frozen(h), 0.1, self.training, inplace=True)
        return F.cross_entropy(self.head(h.mean(1)), labels)


@functools.cache
def captured_noisy() -> tuple[Noisy, Batch, Captured]:
    torch.manual_seed(0)
    model = Noisy()
    model.train().frozen.eval()
    batch = {"x": torch.randn(4, 3, 4, 4), "labels": torch.tensor([0, 3, 1, 2])}
    return model, batch, trace(model, batch)


def noisy() -> tuple[Noisy, Batch, Captured]:
    model, batch, captured = captured_noisy()
    return copy.deepcopy(model), batch, captured


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_masks_of_the_samples_are_those_of_the_model(data: st.DataObject) -> None:
    model, batch, captured = noisy()
    starts = data.draw(cuts(captured))
    other = copy.deepcopy(model)
    dropout = SampleDropout(seed=5, device=CPU)
    with dropout.forward(dropout.draws(2, [7, 0, 3, 9])):
        loss, expected = eager(model, batch)
    with dropout.forward(dropout.draws(2, [7, 0, 3, 9])):
        found_loss, found = piped(captured, starts, other, batch)
    assert torch.equal(found_loss, loss)
    assert_gradients(found, expected, **CLOSE)
    assert_same_buffers(other, model)


def test_a_function_mode_sees_in_a_stage_the_functions_that_it_sees_in_the_model() -> None:
    model, batch, captured = noisy()
    watched = (
        F.batch_norm,
        F.conv2d,
        F.dropout,
        torch.feature_dropout,
        F.scaled_dot_product_attention,
        torch.rand,
        F.linear,
    )

    def seen(run: Callable[[], object]) -> list[str]:
        calls: list[str] = []

        def noted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        with Interception({function: functools.partial(noted, function) for function in watched}):
            run()
        return calls

    stage = captured.stage(0, len(captured.graph.ops), starts=[0]).bind(model, CPU)
    in_stage = seen(lambda: stage(batch, {}, 4))
    assert in_stage == [
        "conv2d", "batch_norm", "feature_dropout", "linear", "scaled_dot_product_attention", "linear", "rand", "dropout", "dropout",
        "linear",
    ]  # fmt: skip


def test_training_and_evaluation_take_turns_on_one_stage() -> None:
    model, batch, captured = noisy()
    stage = captured.stage(0, len(captured.graph.ops), starts=[0]).bind(model, CPU)
    assert stage.training
    torch.manual_seed(3)
    trained = stage(batch, {}, 4)["loss"]
    assert int(model.norm.num_batches_tracked) == 1
    stage.training = False
    torch.manual_seed(3)
    evaluated = stage(batch, {}, 4)["loss"]
    model.eval()
    torch.manual_seed(3)
    assert torch.equal(evaluated, model(**batch))
    assert int(model.norm.num_batches_tracked) == 1
    assert not torch.equal(trained, evaluated)


def test_the_draws_before_a_stage_are_counted() -> None:
    _, _, captured = noisy()
    random = captured.graph.random
    assert [op.split("_")[0] for op in random] == ["feature", "scaled", "rand", "dropout"]
    positions = {op.name: position for position, op in enumerate(captured.graph.ops)}
    starts = [0, positions[random[1]], positions[random[3]]]
    assert [program.random_before for program in programs_of(captured, starts)] == [0, 1, 3]


def test_stages_hold_only_the_parameters_that_they_read_and_share_the_tied_one() -> None:
    model, batch = fresh("gpt")
    captured = captured_case("gpt")
    programs = programs_of(captured, block_starts(captured))
    assert "tokens.weight" in programs[0].parameters
    assert "tokens.weight" in programs[-1].parameters
    assert {name for program in programs for name in program.parameters} == dict(model.named_parameters()).keys()
    elsewhere = copy.deepcopy(model)
    for name, module in elsewhere.named_modules():
        if f"{name}.weight" not in programs[0].parameters:
            for key, parameter in module.named_parameters(recurse=False):
                setattr(module, key, nn.Parameter(parameter.to("meta")))
    stage = programs[0].bind(elsewhere, CPU)
    assert set(stage({"input_ids": batch["input_ids"]}, {}, 3)) == {value.name for value in programs[0].sends}


def test_a_batch_of_another_length_is_refused() -> None:
    model, batch = fresh("gpt")
    captured = captured_case("gpt")
    stage = captured.stage(0, len(captured.graph.ops), starts=[0]).bind(model, CPU)
    with pytest.raises(DataError, match=r"'input_ids' is \[3, 5\] for 3 samples.*made for \[3, 16\]"):
        stage({name: value[:, :5] for name, value in batch.items()}, {}, 3)
    with pytest.raises(DataError, match="for 2 samples"):
        stage(batch, {}, 2)


def test_a_parameter_that_is_put_in_place_later_is_used() -> None:
    model, batch = fresh("gpt")
    captured = captured_case("gpt")
    stage = captured.stage(0, len(captured.graph.ops), starts=[0]).bind(model, CPU)
    before = stage(batch, {}, 3)["loss"]
    model.load_state_dict({name: torch.zeros_like(p) for name, p in model.state_dict().items()}, assign=True)
    after = stage(batch, {}, 3)["loss"]
    assert before != after
    assert torch.equal(after, model(**batch))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.double(), "float64"),
        (lambda model: setattr(model, "norm", None), "no parameter 'norm.weight'"),
    ],
)
def test_a_model_other_than_the_captured_one_is_refused(change: Callable[[nn.Module], object], said: str) -> None:
    model, _ = fresh("gpt")
    change(model)
    captured = captured_case("gpt")
    with pytest.raises(CaptureError, match=said):
        captured.stage(0, len(captured.graph.ops), starts=[0]).bind(model, CPU)


@pytest.mark.parametrize(
    ("start", "stop", "starts"), [(0, 49, [1]), (0, 49, [0, 5, 5]), (0, 49, [0, 60]), (0, 6, [0, 5])]
)
def test_bounds_that_are_not_of_a_cut_are_refused(start: int, stop: int, starts: list[int]) -> None:
    with pytest.raises(PlanError, match=r"start at|no stage"):
        captured_case("gpt").stage(start, stop, starts=starts)


class InPlace(nn.Module):
    """Writes over its own inputs, and over a tensor of which a part that was taken before is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(6, 1)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        weight.mul_(2)
        weight[:, 0] = 1
        kept = self.first(x)
        part = kept.narrow(1, 0, 2)
        h = kept.tanh()
        kept.mul_(3)
        h = self.second(h) * weight
        return self.last(torch.cat([h, part], dim=1)).pow(2).mean()


@functools.cache
def in_place() -> tuple[InPlace, Batch, Captured]:
    torch.manual_seed(0)
    model = InPlace()
    batch = {"x": torch.randn(3, 4), "weight": torch.rand(3, 4)}
    return model, batch, trace(model, batch)


def copied(batch: Batch) -> Batch:
    return {name: value.clone() for name, value in batch.items()}


def test_wherever_memory_is_written_over_a_cut_is_right_or_refused() -> None:
    model, batch, captured = in_place()
    loss, expected = eager(model, copied(batch))
    positions = {op.name: position for position, op in enumerate(captured.graph.ops)}
    (part,) = [op.inputs[1] for op in captured.graph.ops if op.target == "aten.cat.default"]
    taken, written = positions[part], max(at for name, at in positions.items() if name.startswith("mul__"))
    for one in range(1, len(positions) - 1):
        for two in range(one + 1, len(positions)):
            given = copied(batch)
            if any(taken < cut <= written for cut in (one, two)):
                with pytest.raises(PlanError, match=r"test_stage_program\.py:\d+: kept\.mul_\(3\)"):
                    programs_of(captured, [0, one, two])
                continue
            found_loss, found = piped(captured, [0, one, two], model, given)
            assert torch.equal(found_loss, loss), (one, two)
            assert_gradients(found, expected, **CLOSE)
            assert all(torch.equal(given[name], batch[name]) for name in batch)


class Twice(nn.Module):
    """One BatchNorm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.between = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.between(self.norm(x))).pow(3).mean()


def test_a_buffer_that_forward_changes_belongs_to_one_stage() -> None:
    batch = {"x": torch.randn(5, 4)}
    captured = trace(Twice(), batch)
    middle = next(i for i, op in enumerate(captured.graph.ops) if "linear" in op.target)
    with pytest.raises(PlanError, match=r"norm\.(running|num).*which forward changes in stage 0"):
        programs_of(captured, [0, middle])


class TimeFirst(nn.Module):
    """Samples lie behind time in a dim of both, in the way of recurrent models."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        behind = self.inward(x.transpose(0, 1).reshape(length * samples, 2)).tanh()
        before = self.inward(x.reshape(samples * length, 2)).tanh()
        h = behind.view(length, samples, 4).transpose(0, 1) + before.view(samples, length, 4)
        return self.outward(h).mean()


def test_samples_that_lie_behind_another_dim_cannot_be_cut_out() -> None:
    captured = trace(TimeFirst(), {"x": torch.randn(3, 5, 2)})
    last = next(i for i, op in enumerate(captured.graph.ops) if op.target == "aten.view.default")
    behind, before = captured.stage(0, last, starts=[0, last]).sends
    assert [(v.batch_dim, v.rows_a_sample, v.ordered) for v in (behind, before)] == [(0, 5, False), (0, 5, True)]
    assert mixing_samples(captured.graph) & {behind.name, before.name} == {behind.name}
    stages = tuple(
        Stage(ops=ops, devices=devices, regions=(Region(layout=Layout(shares=(1,) * len(devices))),))
        for ops, devices in (((0, last), ("a", "b")), ((last, len(captured.graph.ops)), ("c",)))
    )
    shared = Pipeline(micro_batches=MicroBatches((3,)), stages=stages)
    plan = Plan(global_batch_size=3, pipelines=(shared,))
    devices = (Device(id=name, kind="CPU", node="n", memory_bytes=2**30, backend="cpu") for name in "abc")
    machine = Cluster(name="c", devices=tuple(devices), links=())
    said = " ".join(violations(plan, captured.graph, machine))
    assert f"sends {behind.name} (" in said
    assert f"sends {before.name} (" not in said


class Regions(nn.Module):
    """A part without gradients, in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.online = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            goal = self.target(x).softmax(-1)
        return (self.online(x) - goal).pow(2).mean()


@pytest.mark.tour("frontend/")
def test_regions_are_those_of_the_model_and_end_with_the_stage_whatever_happens() -> None:
    torch.manual_seed(0)
    model, batch = Regions(), {"x": torch.randn(3, 4)}
    captured = trace(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = eager(model, batch)
        for cut in range(1, len(captured.graph.ops)):
            found_loss, found = piped(captured, [0, cut], model, batch)
            torch.testing.assert_close(found_loss, loss, rtol=1e-2, atol=0)
            assert found["target.weight"] is None
            assert_gradients(found, expected, rtol=0.05, atol=1e-3)
        stage = captured.stage(0, len(captured.graph.ops), starts=[0]).bind(model, CPU)
        with pytest.raises(RuntimeError):
            stage({"x": torch.randn(3, 4).to("meta")}, {}, 3)
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")


def test_compiled_code_keeps_to_the_regions_of_the_model() -> None:
    class Regional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.first(x).sigmoid()
            with torch.autocast("cpu", enabled=False):
                return (self.second(x.float()) * scale).square().mean()

    torch.manual_seed(0)
    model, batch = Regional(), {"x": torch.randn(3, 4)}
    captured = trace(model, batch)
    stage = captured.stage(0, len(captured.graph.ops), starts=[0]).bind(model, torch.device("cpu"))
    traced_only = functools.partial(torch.compile, backend="aot_eager")  # what is lost is lost before inductor
    with mock.patch.object(torch, "compile", traced_only), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler, about itself
        assert stage.compile()
        with torch.autocast("cpu", torch.bfloat16):
            loss = stage(batch, {}, 3)["loss"]
            expected = model(**batch)
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.is_grad_enabled()
    assert model.first.weight.grad is None
    assert model.second.weight.grad is not None
