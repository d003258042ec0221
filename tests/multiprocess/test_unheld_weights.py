"""Weights that a rank not every rank holds whole: their values raise between two steps."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import heterodyne as hd
from heterodyne.errors import HeterodyneError, PlanError
from heterodyne.frontend import trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import session_of
from multiprocess.work import PipelineOf, StageOf, cluster_of, plan_of, staged_plan
from pure.build import linear, profile

SAMPLES = 6


class Taught(nn.Module):
    """A student, and a teacher that follows it between two steps: their first layers, then their last ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.ModuleDict({"first": nn.Linear(4, 8), "last": nn.Linear(8, 4)})
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(4))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        hidden, wanted = self.student["first"](points).tanh(), self.teacher["first"](points).tanh()
        outputs, target = self.student["last"](hidden) * self.scale, self.teacher["last"](wanted)
        return F.cross_entropy(outputs, labels) + F.mse_loss(outputs, target - self.center)


def batch_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(seed))
    return {"points": points.to(dtype), "labels": points.argmax(1)}


@functools.cache
def graph(dtype: torch.dtype = torch.float32) -> ModelGraph:
    return trace(Taught().to(dtype), batch_of(dtype=dtype), name="Taught").graph


def plans(dtype: torch.dtype = torch.float32) -> dict[str, Plan]:
    """On two ranks."""
    found, here = graph(dtype), cluster_of(2)
    cut, end = max(i for i, op in enumerate(found.ops) if "tanh" in op.target) + 1, len(found.ops)
    stages = StageOf(cut, (0,), (1,)), StageOf(end, (1,), (1,))
    in_parts = StageOf(end, (0, 1), (5, 3), kind="split")
    return {
        "data": plan_of(found, here, ((2, 2), (1, 1))),
        "pipeline": staged_plan(found, here, [PipelineOf((2, 2, 2), stages)], "1F1B"),
        "zero 1": plan_of(found, here, ((2, 2), (1, 1)), zero=1),
        "zero 3": plan_of(found, here, ((2, 2), (1, 1)), zero=3),
        "split": staged_plan(found, here, [PipelineOf((4, 2), (in_parts,))], "1F1B"),
    }


def start(world: World, model: Taught, plan: Plan, **more: Any) -> hd.Distributed:
    dtype = model.scale.dtype
    known = profile(
        graph(dtype), cluster_of(world.world_size), [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6
    )
    options = {"optimizer": functools.partial(torch.optim.AdamW, lr=0.05), "session": session_of(world), **more}
    found_so = hd.PlanOptions(plan, profile=known, check_s=0)
    return hd.distribute(model, batch_of(dtype=dtype), plan=found_so, **options)


USES: dict[str, Callable[[nn.Module, nn.Parameter], Any]] = {
    "in place": lambda _, p: p.mul_(0.9),
    "into": lambda _, p: p.copy_(torch.ones(p.shape)),
    "from": lambda _, p: torch.zeros(p.shape).add_(p, alpha=0.1),
    "several": lambda _, p: torch._foreach_mul_([torch.ones(3), p], 0.9),
    "data": lambda _, p: p.data,
    "set data": lambda _, p: setattr(p, "data", torch.ones(p.shape)),
    "detach": lambda _, p: p.detach(),
    "gradient": lambda _, p: p.grad,
    "norm": lambda model, _: nn.utils.get_total_norm(list(model.parameters())),
    "to": lambda _, p: p.to(torch.float64),
    "numpy": lambda _, p: p.__array__(),
    "item": lambda _, p: p.flatten()[0].item(),
    "initialise": lambda _, p: nn.init.zeros_(p),
    "copy": lambda model, _: copy.deepcopy(model),
    "average": lambda model, _: torch.optim.swa_utils.AveragedModel(model),
    "pickle": lambda _, p: pickle.dumps(p),
    "state": lambda model, _: torch.save(model.state_dict(), io.BytesIO()),
    "save": lambda model, _: torch.save(model, io.BytesIO()),
    "call": lambda model, _: model(**batch_of()),
}


def load_quietly(model: nn.Module, state: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.load_state_dict(state, strict=False)


def used(world: World, plan: Plan) -> dict[str, str]:
    """What each use is told, of a parameter that was taken before; and whether the rest goes on."""
    model = Taught()
    before, objects = dict(model.named_parameters()), [*model.parameters(), *model.buffers()]
    sizes = {name: tuple(p.shape) for name, p in before.items()}
    with start(world, model, plan) as trainer:
        trainer.step(batch_of())
        told = {}
        name = f"student.{'last' if world.rank == 0 else 'first'}.weight"
        with torch.no_grad():
            for use, call in USES.items():
                with pytest.raises(PlanError) as refused:
                    call(model, before[name])
                told[use] = str(refused.value)
        with pytest.raises(RuntimeError, match="not every rank holds whole"):  # torch collects what fails
            load_quietly(model, {name: torch.zeros(sizes[name])})
        assert {name: (tuple(p.shape), p.numel(), p.dtype) for name, p in model.named_parameters()} == {
            name: (size, torch.Size(size).numel(), torch.float32) for name, size in sizes.items()
        }
        assert before[name].device == trainer.optimizer.param_groups[0]["params"][0].device
        assert name in repr(before[name])
        assert isinstance(before[name], nn.Parameter)
        assert torch.numel(input=before[name]) == before[name].numel()
        assert before[name].get_device() == -1
        model.to(before[name].device)
        model.zero_grad()
        assert before[name].grad is None
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
        model.requires_grad_(True)
        model.teacher.requires_grad_(False)
        trainer.step(batch_of(1))
        trainer.evaluate(batch_of(2))
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
    assert {type(t) for t in objects} == {nn.Parameter, Tensor}
    copy.deepcopy(model)(**batch_of()).backward()
    told["trained"] = ",".join(f"{p.sum():.5f}" for p in before.values())
    return told


@pytest.mark.parametrize("name", ["pipeline", "zero 3", "split"])
def test_what_is_not_held_whole_raises_in_the_line_that_uses_it(pool: Pool, name: str) -> None:
    model = Taught()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        model(**batch_of(step)).backward()
        optimizer.step()
    for rank, told in enumerate(pool.run(2, used, plans()[name])):
        sums = [float(value) for value in told.pop("trained").split(",")]
        torch.testing.assert_close(sums, [p.sum().item() for p in model.parameters()], rtol=1e-4, atol=1e-4)
        for use, words in told.items():
            assert "which not every rank holds whole" in words, (use, words)
            assert "trainer.whole_weights()" in words
            if use not in ("norm", "copy", "average", "state", "save", "call"):
                assert f"'student.{'last' if rank == 0 else 'first'}.weight'" in words
                if name == "pipeline":
                    assert f"rank {1 - rank} (stage {1 - rank}) holds it" in words


def gradients_read(world: World, plan: Plan) -> str:
    """What is told of a gradient after a step. Values, and gradients that the script has cleared or made, can be used."""
    model = Taught()
    with start(world, model, plan) as trainer:
        trainer.step(batch_of())
        with pytest.raises(PlanError) as refused:
            nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert float(model.scale.detach()) != 0
        model.zero_grad()
        assert model.scale.grad is None
        (model.scale * 3).backward()
        assert model.scale.grad == 3
        model.zero_grad()
        trainer.step(batch_of(1))
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    return str(refused.value)


def test_a_gradient_of_which_each_rank_keeps_a_part_is_not_read(pool: Pool) -> None:
    for told in pool.run(2, gradients_read, plans()["zero 1"]):
        assert "the gradient of 'scale', of which each rank keeps the part that it updates" in told


def replaced(world: World, plan: Plan) -> tuple[list[float], list[float], str, str]:
    """A buffer replaced before it is asked for whole: its values, those after a step, what its use and a hook are told."""
    model = Taught()
    with start(world, model, plan) as trainer:
        trainer.step(batch_of())
        model.center = torch.full((4,), 0.5)
        with trainer.whole_weights("center") as whole:
            before = whole.center.tolist()
        trainer.step(batch_of(1))
        with pytest.raises(PlanError) as refused:
            model.center.sum()
        with pytest.raises(PlanError) as hooked:
            model.student["first"].weight.register_hook(lambda gradient: gradient * 2)
        with trainer.whole_weights() as whole:
            after = whole.center.tolist()
    return before, after, str(refused.value), str(hooked.value)


def test_a_buffer_in_the_place_of_another_is_cut_and_guarded_as_that_one(pool: Pool) -> None:
    for before, after, told, of_hook in pool.run(2, replaced, plans()["pipeline"]):
        assert before == after == [0.5] * 4
        assert "'center', which not every rank holds whole" in told
        assert "has a hook on its gradient" in of_hook


def follow(model: nn.Module, step: int) -> None:
    """What a mean teacher and DINO do between two steps: the teacher follows, its center too, and a scale is kept in bounds."""
    with torch.no_grad():
        for teacher, student in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            teacher.mul_(0.9).add_(student, alpha=0.1)
        model.center.mul_(0.9).add_(model.teacher["last"].bias, alpha=0.1)
        model.scale.clamp_(max=1.52)
        if step == 2:  # surgery
            model.student["first"].weight[:2].zero_()
        model.eval()
        assert torch.isfinite(model(**batch_of(step)))
        model.train()


def taught(world: World, plan: Plan, **more: Any) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = Taught(), []
    with start(world, model, plan, **more) as trainer:
        for step in range(5):
            losses.append(trainer.step(batch_of(step)).loss)
            with trainer.whole_weights() as whole:
                assert whole is model
                follow(whole, step)
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@functools.cache
def alone() -> tuple[list[float], dict[str, Tensor]]:
    """On one device."""
    model, losses = Taught(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(**batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        follow(model, step)
    return losses, model.state_dict()


@pytest.mark.parametrize("name", ["pipeline", "zero 3", "split", "data"])
def test_a_teacher_that_follows_between_steps_is_that_of_one_device(pool: Pool, name: str) -> None:
    for losses, state in pool.run(2, taught, plans()[name]):
        torch.testing.assert_close(losses, alone()[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state, dict(alone()[1]), rtol=1e-5, atol=1e-6)


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({"model": dict(state["model"]), "optimizer": state["optimizer"]})


def changed_names(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The weights and the entries of the optimizer's state that are not the same bits."""
    changed = {name for name, value in before["model"].items() if not torch.equal(value, after["model"][name])}
    for name, entries in before["optimizer"].items():
        others = after["optimizer"][name]
        changed |= {f"{name}/{key}" for key in entries if not torch.equal(entries[key], others[key])}
    return changed


def within(trainer: hd.Distributed, do: Callable[[], Any]) -> None:
    with trainer.whole_weights():
        do()


def in_blocks(world: World, plan: Plan) -> dict[str, Any]:
    """A model in 16 bits: what is left of blocks that change nothing, one weight, or end badly."""
    model, told = Taught().bfloat16(), {}

    batch = functools.partial(batch_of, dtype=torch.bfloat16)
    with start(world, model, plan) as trainer:
        for step in range(2):
            trainer.step(batch(step))
        first = copied(trainer.state_dict())
        with trainer.whole_weights():
            loss = model(**batch(2))  # its graph outlives the block
            model(**batch(2)).backward()
            told["gradients"] = {
                tuple(p.grad.shape) == tuple(p.shape) for p in model.parameters() if p.grad is not None
            }
        left = changed_names(first, trainer.state_dict())
        assert not left, left
        unheld = "student.last.weight" if world.rank == 0 else "student.first.weight"
        with trainer.whole_weights("scale", "teacher.last.bias"):
            if not trainer.plan.zero:
                with pytest.raises(PlanError, match=unheld):
                    model.get_parameter(unheld).sum()
            model.scale.data = torch.tensor(2.0, dtype=torch.bfloat16)
        told["changed"] = changed_names(first, trainer.state_dict())
        second = copied(trainer.state_dict())
        told["scale"] = (second["model"]["scale"].item(), second["optimizer"]["scale"]["master"].item())
        with pytest.raises(PlanError, match="'scale' has other values on rank 1 than on rank 0"):
            within(trainer, lambda: model.scale.data.fill_(3.0 + world.rank))
        with pytest.raises(ZeroDivisionError if world.rank else PlanError, match="division"):
            within(trainer, lambda: model.teacher["first"].weight.data.zero_() if world.rank == 0 else 1 / 0)
        with pytest.raises(HeterodyneError, match=r"step\(\) is called inside of"):
            within(trainer, lambda: trainer.step(batch(3)))
        scale = model.scale
        with pytest.raises(PlanError, match="'scale' was replaced by another object"):
            within(trainer, lambda: setattr(model, "scale", nn.Parameter(torch.tensor(1.0))))
        model.scale = scale
        nothing = SimpleNamespace(available=1000 * world.rank)
        with (
            pytest.raises(PlanError, match=r"are needed .* and 0 B are available"),
            mock.patch("psutil.virtual_memory", return_value=nothing),
        ):
            within(trainer, lambda: None)
        assert changed_names(second, trainer.state_dict()) == set()
        del loss
        told["loss"] = trainer.step(batch(3)).loss
    return told


@pytest.mark.parametrize("name", ["pipeline", "zero 3", "zero 1", "split"])
def test_a_block_of_whole_weights_changes_what_it_changes_and_no_other_bit(pool: Pool, name: str) -> None:
    for told in pool.run(2, in_blocks, plans(torch.bfloat16)[name]):
        assert told["changed"] == {"scale", "scale/master"}
        assert told["gradients"] == {True}
        assert told["scale"] == (2.0, 2.0)
        assert told["loss"] < 5


def averaged(world: World, plan: Plan, other: Plan, folder: str) -> dict[str, Any]:
    """Three steps, one that is skipped, and two more under another plan, from a checkpoint."""
    told: dict[str, Any] = {}
    broken = {**batch_of(9), "points": torch.full((SAMPLES, 4), torch.inf)}
    with start(world, Taught(), plan) as trainer:
        trainer.step(batch_of(0))
        average = trainer.average(0.9)
        for step in (1, 2):
            trainer.step(batch_of(step))
        trainer.step(broken)
        trainer.step(batch_of(3))
        before = copied(trainer.state_dict())
        told["loss"] = average.evaluate(batch_of(7))
        told["state"] = average.state_dict()
        with average.applied():
            trainer.save_pretrained(Path(folder) / "average")
            with pytest.raises(HeterodyneError, match=r"save_checkpoint\(\) is called inside of"):
                trainer.save_checkpoint(Path(folder) / "kept")
        left = changed_names(before, trainer.state_dict())
        assert not left, left
        trainer.save_checkpoint(Path(folder) / "kept")
    with start(world, Taught(), other) as trainer:
        trainer.load_checkpoint(Path(folder) / "kept")
        average = trainer.average(0.9)
        for step in (4, 5):
            trainer.step(batch_of(step))
        told["later"] = average.state_dict()
    return told


@functools.cache
def averaged_alone() -> list[dict[str, Tensor]]:
    """The averages after each of six steps."""
    model, found = Taught(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    average = None
    for step in range(6):
        optimizer.zero_grad()
        model(**batch_of(step)).backward()
        optimizer.step()
        if average is None:
            average = torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            average.n_averaged.fill_(1)  # it has the weights as they are
        else:
            average.update_parameters(model)
        found.append({name: tensor.clone() for name, tensor in average.module.state_dict().items()})
    return found


@pytest.mark.parametrize(
    ("name", "other"),
    [("data", "zero 3"), ("pipeline", "split"), ("zero 1", "pipeline"), ("zero 3", "zero 1"), ("split", "data")],
)
def test_an_average_under_a_plan_is_that_of_one_device(pool: Pool, tmp_path: Path, name: str, other: str) -> None:
    wanted = Taught()
    wanted.load_state_dict(averaged_alone()[3])
    for told in pool.run(2, averaged, plans()[name], plans()[other], str(tmp_path)):
        torch.testing.assert_close(told["state"], averaged_alone()[3], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(told["later"], averaged_alone()[5], rtol=1e-5, atol=1e-6)
        assert told["loss"] == pytest.approx(wanted(**batch_of(7)).item(), rel=1e-5)
    torch.testing.assert_close(
        load_file(tmp_path / "average" / "model.safetensors"), averaged_alone()[3], rtol=1e-5, atol=1e-6
    )


def averaged_in_16_bits(world: World, plan: Plan) -> tuple[set[str], list[dict[str, Tensor]], dict[str, Tensor]]:
    """What is changed by applying an average, the masters after each step, and the average in fp32."""
    batch, masters = functools.partial(batch_of, dtype=torch.bfloat16), []

    def note() -> dict[str, Any]:
        state = copied(trainer.state_dict())
        masters.append({name: entries["master"] for name, entries in state["optimizer"].items()})
        return state

    with start(world, Taught().bfloat16(), plan) as trainer:
        trainer.step(batch(0))
        average = trainer.average(0.9)
        note()
        for step in (1, 2, 3):
            trainer.step(batch(step))
            before = note()
        average.evaluate(batch(4))
        changed = changed_names(before, trainer.state_dict())
        return changed, masters, dict(trainer.state_dict()["averages"]["0"]["weights"])


@pytest.mark.parametrize("name", ["pipeline", "zero 1", "zero 3", "split"])
def test_an_average_of_weights_in_16_bits_is_one_of_their_masters(pool: Pool, name: str) -> None:
    for changed, masters, average in pool.run(2, averaged_in_16_bits, plans(torch.bfloat16)[name]):
        assert not changed, changed
        for parameter, first in masters[0].items():
            wanted = first.clone()
            for later in masters[1:]:
                wanted.lerp_(later[parameter], 1 - 0.9)
            assert torch.equal(wanted, average[parameter]), parameter
