"""What cannot be is refused before anything is captured or measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import heterodyne as hd
from heterodyne.api.loop.batches import BatchFormat, batch_format
from heterodyne.api.loop.model_with_loss import names_of, with_loss
from heterodyne.api.loop.remade_optimizer import remade
from heterodyne.api.options import chosen_optimizer
from heterodyne.around_model import unchanged_around
from heterodyne.errors import CaptureError, DataError, HeterodyneError
from heterodyne.job import OptimizerSection

MODEL = nn.Linear(3, 2)
BATCH = torch.randn(4, 3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"optimizer": "adamw"}, "optimizer is 'adamw'; it is an optimizer of torch.optim"),
        ({"plan": 3}, "plan is 3; it is a strategy"),
        ({"precision": "fp8"}, "precision is 'fp8', not 'fp32' or 'bf16' or 'fp16' or 'auto'"),
        ({"precision": torch.bfloat16}, "write 'bf16'"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm is nan; it is the largest norm"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"total_steps": True}, "total_steps is True"),
        ({"loss": 3}, "loss is 3; it is a function"),
        ({"run": 3}, r"run is 3; it is the path of a directory, or RunOptions"),
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_that_cannot_be_is_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(HeterodyneError, match=told):
        hd.distribute(MODEL, BATCH, **arguments)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: hd.PlanOptions(3), "plan is 3; it is a strategy"),  # type: ignore[arg-type]
        (lambda: hd.PlanOptions(micro_batch_sizes=()), r"micro_batch_sizes is \(\)"),
        (lambda: hd.PlanOptions(asynchronous="yes"), "asynchronous is 'yes', not one of predicted"),  # type: ignore[arg-type]
        (lambda: hd.PlanOptions(micro_batch_sizes=(1, 2.5)), "whole numbers from 1 on"),  # type: ignore[arg-type]
        (lambda: hd.LossOptions(only=("labels",)), "names what only a loss outside of the model reads: pass that too"),
        (lambda: hd.RunOptions("run", trackers=["wandbb"]), "wandbb: there is no such key; did you mean 'wandb'"),
        (lambda: hd.RunOptions(trackers=["wandb"]), "pass dir= too"),
        (lambda: hd.RunOptions(resume=True), "pass dir= too"),
        (lambda: hd.RunOptions(trackers="wandb"), "trackers is 'wandb'; it is a list of names"),
        (lambda: hd.RunOptions(weights_at_end="everywhere"), "weights_at_end is 'everywhere'"),  # type: ignore[arg-type]
    ],
    ids=range(10),
)
def test_an_option_that_cannot_be_is_told(make: Callable[[], object], told: str) -> None:
    with pytest.raises(HeterodyneError, match=told):
        make()


def test_all_of_them_are_told_at_once() -> None:
    with pytest.raises(HeterodyneError, match=r"(?s)global_batch_size.*precision.*seed"):
        hd.distribute(MODEL, BATCH, global_batch_size=0, precision="fp8", seed="a")  # type: ignore[arg-type]


def test_a_rate_is_constant_unless_it_is_known_how_long_its_schedule_is() -> None:
    default = chosen_optimizer(None, None)
    assert isinstance(default, OptimizerSection)
    assert default.schedule == "constant"
    assert chosen_optimizer(OptimizerSection(lr=1.0), None) == OptimizerSection(lr=1.0, schedule="constant")
    assert chosen_optimizer(OptimizerSection(lr=1.0), 10) == OptimizerSection(lr=1.0)
    for fields in ({"schedule": "cosine"}, {"min_lr_ratio": 0.5}):
        with pytest.raises(HeterodyneError, match="the length of the schedule: pass total_steps="):
            chosen_optimizer(OptimizerSection.model_validate(fields), None)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (iter([BATCH]), r"pass one batch of it, next\(iter\(loader\)\)"),
        ((), "the batch is empty"),
        ({"x": BATCH.numpy()}, "the entry x of the batch is a ndarray, not a tensor: torch.from_numpy makes one"),
        (((BATCH, BATCH), BATCH), "side by side, in one tuple or mapping"),
        ({"ids": [[1, 2], [3]]}, 'return_tensors="pt"'),
        (5, "pass the tensors of one batch"),
    ],
)
def test_what_is_no_batch_is_told(batch: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        hd.distribute(MODEL, batch)


class Two(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left @ right.T).diagonal()


@pytest.mark.tour("api/loop/")
def test_batches_get_names_and_are_given_back_as_they_were() -> None:
    assert batch_format(MODEL, BATCH, has_loss=False) == BatchFormat(names=("input",), bare=True)
    assert batch_format(MODEL, (BATCH,), has_loss=True) == BatchFormat(names=("input",))
    format = batch_format(Two(), (BATCH, BATCH, BATCH[:, 0]), has_loss=True)
    assert format.names == ("left", "right", "target")
    named = format.named((BATCH, BATCH + 1, BATCH[:, 0]))
    assert isinstance(named, dict)
    assert torch.equal(named["right"], BATCH + 1)
    assert isinstance(format.as_given(named), tuple)
    assert list(format.named((BATCH, BATCH), without_target=True)) == ["left", "right"]  # type: ignore[call-overload]
    with pytest.raises(DataError, match="the batch has 2 tensors, that of the example was 3"):
        format.named((BATCH, BATCH))
    mapping = batch_format(Two(), {"left": BATCH, "right": BATCH}, has_loss=False)
    assert mapping.as_given({"left": BATCH}) == {"left": BATCH}


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input @ self.weight).sum()


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(input).square().mean()


def _first_alone(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([next(iter(parameters))], lr=0.1)


def test_parameters_that_an_optimizer_leaves_out_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with hd.distribute(Loss(), BATCH, optimizer=_first_alone, plan=hd.PlanOptions(check_s=0)):
        assert "optimizer= leaves out 3 of the 4 parameters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: hd.capture(None, (BATCH,)), "model is None; it is an nn.Module"),  # type: ignore[arg-type]
        (lambda: hd.capture(MODEL, 3), "the batch is a int"),  # type: ignore[arg-type]
        (lambda: hd.capture(Nothing(), (BATCH,)), r"the weights of Nothing \(weight\) hold nothing"),
        (lambda: hd.distribute(MODEL, BATCH, run=hd.RunOptions(callbacks=[3])), "in it is 3, which is none: derive it from hd.Callback"),  # type: ignore[list-item]
        (lambda: hd.distribute(MODEL, BATCH, run=hd.RunOptions(callbacks=[hd.Callback])), r"make one of it: Callback\(\)"),  # type: ignore[list-item]
        (lambda: hd.distribute(MODEL, (BATCH, BATCH), loss=hd.LossOptions(nn.MSELoss(), only=("y",))), "the batch is no mapping"),
        (lambda: hd.batches([1], global_batch_size=2, workers=10**6), "workers is 1000000; it is a whole number from 0 to 1,024"),
        (lambda: hd.batches("text", global_batch_size=2), "a str is no data"),
        (lambda: hd.Plan.load(3), "Plan.load cannot take these arguments"),  # type: ignore[arg-type]
        (lambda: hd.Plan.load("nowhere"), "nowhere: cannot be read"),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_call_that_cannot_be_is_refused(call: Any, told: str) -> None:
    with pytest.raises(HeterodyneError, match=told):
        call()


def test_a_trainer_checks_what_it_is_given(tmp_path: Any) -> None:
    with hd.distribute(Loss(), BATCH, plan=hd.PlanOptions(measure_s=0.1, rehearsal_s=0, check_s=0)) as trainer:
        before = trainer.state_dict()
        for call, told in (
            (lambda: trainer.validate([BATCH], metrics={"a": 3}), "'a' in it is 3"),  # type: ignore[dict-item]
            (lambda: trainer.load_state_dict(None), "state is None"),  # type: ignore[arg-type]
            (lambda: trainer.load_state_dict({}), "it is a state that this run cannot take"),
            (lambda: trainer.load_checkpoint(tmp_path / "nowhere"), "there is no directory"),
            (lambda: trainer.save_checkpoint(tmp_path / "kept", keep=0), "keep is 0"),
            (lambda: trainer.predict(torch.zeros(2)), "it has 2 dims in the example"),
        ):
            with pytest.raises(HeterodyneError, match=told):
                call()
        assert trainer.load_checkpoint(tmp_path) is None
        after = trainer.state_dict()
        assert all(torch.equal(after["model"][name], tensor) for name, tensor in before["model"].items())


def test_an_optimizer_of_other_weights_or_with_state_is_refused() -> None:
    with pytest.raises(HeterodyneError, match=r"SGD has 2 parameter\(s\) that neither the model nor its loss has"):
        remade(torch.optim.SGD(nn.Linear(3, 2).parameters()), MODEL)
    model = nn.Linear(3, 2)
    used = torch.optim.Adam(model.parameters())
    model(BATCH).sum().backward()
    used.step()
    with pytest.raises(HeterodyneError, match="has made steps before, or has loaded state, which would be lost"):
        remade(used, model)


def test_attributes_that_a_forward_sets_are_as_they_were_after_a_trial() -> None:
    class Caching(nn.Module):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale, self.seen = 2.0, x
            return x

    model = Caching()
    with unchanged_around(model):
        model(BATCH)
        assert model.scale == 2.0
    assert (model.scale, hasattr(model, "seen")) == (1.0, False)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * self.scale - target).square().mean()


@pytest.mark.parametrize("name", ["loss_fn", "model", "loss"])
@pytest.mark.parametrize("loss", [nn.MSELoss(), Learned()], ids=["plain", "learned"])
def test_a_model_may_call_its_modules_as_the_runtime_does(name: str, loss: nn.Module) -> None:
    """Names go from the captured module to the user's and back, or the model is refused."""
    model = nn.Sequential()
    model.add_module(name, nn.Linear(3, 2))
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    format = batch_format(model, batch, has_loss=True)
    named = format.named(batch)
    assert isinstance(named, dict)
    if name == "loss_fn" and isinstance(loss, Learned):
        with pytest.raises(CaptureError, match="a module called 'loss_fn'"):
            with_loss(model, loss, format, named, withheld=())
        return
    module = with_loss(model, loss, format, named, withheld=())
    names, state = names_of(module), module.state_dict()
    captured = {"model": dict(state), "optimizer": {key: {"step": 1} for key, _ in module.named_parameters()}}
    own = names.own_state(captured)
    assert own["model"].keys() == model.state_dict().keys()
    assert names.captured_state(own) == captured
