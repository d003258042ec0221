"""What cannot be is refused before anything is captured or measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import heterodyne as hd
from heterodyne.api.loop.arguments import chosen_optimizer
from heterodyne.api.loop.batches import BatchFormat, batch_format
from heterodyne.errors import DataError, HeterodyneError
from heterodyne.job import OptimizerSection

MODEL = nn.Linear(3, 2)
BATCH = torch.randn(4, 3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"optimizer": torch.optim.AdamW(MODEL.parameters(), lr=0.25)}, r"lambda parameters: AdamW\(parameters, lr=0.25\)"),
        ({"optimizer": "adamw"}, "optimizer is 'adamw'; it is an OptimizerSection"),
        ({"plan": 3}, "plan is 3; it is a strategy"),
        ({"precision": "fp8"}, "precision is 'fp8', not 'fp32' or 'bf16' or 'fp16' or 'auto'"),
        ({"precision": torch.bfloat16}, "write 'bf16'"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm is nan; it is the largest norm"),
        ({"micro_batch_sizes": ()}, r"micro_batch_sizes is \(\)"),
        ({"micro_batch_sizes": (1, 2.5)}, "whole numbers from 1 on"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"total_steps": True}, "total_steps is True"),
        ({"loss": 3}, "loss is 3; it is a function"),
        ({"loss_inputs": ("labels",)}, "pass that as loss= too"),
        ({"trackers": ["wandbb"], "run_dir": "run"}, r"wandbb: there is no such key; did you mean 'wandb'"),
        ({"trackers": ["wandb"]}, r"pass run_dir= too"),
        ({"trackers": "wandb"}, r"trackers is 'wandb'; it is a list of names"),
        ({"weights_at_end": "everywhere"}, "weights_at_end is 'everywhere'"),
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_that_cannot_be_is_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(HeterodyneError, match=told):
        hd.distribute(MODEL, BATCH, **arguments)


def test_all_of_them_are_told_at_once() -> None:
    with pytest.raises(HeterodyneError, match=r"(?s)micro_batch_sizes.*precision.*seed"):
        hd.distribute(MODEL, BATCH, precision="fp8", micro_batch_sizes=4, seed="a")  # type: ignore[arg-type]


def test_a_rate_is_constant_unless_it_is_known_how_long_its_schedule_is() -> None:
    default = chosen_optimizer(None, None)
    assert isinstance(default, OptimizerSection)
    assert default.schedule == "constant"
    assert chosen_optimizer(OptimizerSection(lr=1.0), None) == OptimizerSection(lr=1.0, schedule="constant")
    assert chosen_optimizer(OptimizerSection(lr=1.0), 10) == OptimizerSection(lr=1.0)
    for fields in ({"schedule": "cosine"}, {"min_lr_ratio": 0.5}):
        with pytest.raises(HeterodyneError, match="how long the schedule is: pass total_steps="):
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
