"""A loop as people write it, on the one device of this process: a loss outside of the model, an optimizer and a scheduler of one's own,
outputs, metrics, a run directory and a resume."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import heterodyne as hd
from heterodyne.api.loop.callbacks import Callback
from heterodyne.errors import (
    CaptureError,
    CheckpointError,
    DataError,
    HeterodyneError,
    InfeasibleError,
    NumericsError,
    OutOfMemoryError,
)
from heterodyne.job import OptimizerSection
from heterodyne.report.html import write_report
from heterodyne.runtime.records.shortages import note_shortage, read_shortages
from heterodyne.runtime.worker import StepResult, Worker

CLASSES = 3
NOTING_TRACKER = """
import json

class Tracker:
    def __init__(self, opening):
        self.path, self.seen = opening.directory / "tracked.json", []

    def write(self, records):
        self.seen += [[r.step, r.values.get("train/loss", r.values.get("validation/loss"))] for r in records]

    def close(self):
        self.path.write_text(json.dumps(self.seen))
"""


def classifier(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, CLASSES))


def batch_of(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(samples, 4, generator=generator)
    return points, points[:, :CLASSES].argmax(1)


def groups(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """As people write it: no decay on biases and on the norm, by the names of their model."""
    named = list(named_parameters)
    spared = {name for name, _ in named if name.endswith("bias") or name.startswith("1.")}
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if name not in spared], "weight_decay": 0.5},
            {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


def hits(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[float, int]:
    return (outputs.argmax(1) == batch[1]).sum().item(), len(batch[1])


class Noted(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_end(self, trainer: hd.Distributed, result: Any) -> None:
        self.seen.append(f"step {result.step}")

    def on_evaluate(self, trainer: hd.Distributed, metrics: Mapping[str, float]) -> None:
        self.seen.append(" ".join(metrics))

    def on_save(self, trainer: hd.Distributed, path: Path) -> None:
        self.seen.append(path.name)


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterable[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_a_loop_with_a_criterion_a_scheduler_and_a_run_directory(tmp_path: Path) -> None:
    model, noted, batches = classifier(), Noted(), [batch_of(6, seed) for seed in range(4)]
    plain = copy.deepcopy(model)
    run = tmp_path / "run"

    def start(model: nn.Module, **of_run: Any) -> hd.Distributed:
        return hd.distribute(
            model,
            batches[0],
            loss=nn.CrossEntropyLoss(),
            optimizer=groups,
            plan=hd.PlanOptions(measure_s=0.05),
            run=hd.RunOptions(run, **of_run),
        )

    (tmp_path / "noting.py").write_text(NOTING_TRACKER)
    tracker = {"custom": {"factory": f"{tmp_path / 'noting.py'}:Tracker"}}
    with start(model, callbacks=[noted], trackers=[tracker]) as trainer:
        assert trainer.module is model
        assert trainer.graph.name == "Sequential"
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
        found = []
        for batch in batches[:2]:
            found.append((trainer.step(batch).loss, trainer.optimizer.param_groups[0]["lr"]))
            scheduler.step()
        outputs = trainer.predict(batch_of(5))
        assert torch.equal(trainer.predict(batch_of(5)[:1]), outputs), "the target is not needed for outputs"
        validation = trainer.validate([batch_of(5), batch_of(2, seed=9)], {"accuracy": hits})
        with pytest.raises(DataError, match="there are no batches to validate on"):
            trainer.validate([])
        with pytest.raises(DataError, match="the batch to evaluate has no samples"):
            trainer.evaluate((torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)))
        wrong = batches[0][1].clone()
        wrong[2] = CLASSES
        with pytest.raises(
            DataError, match=r"step 3, sample 2: target holds 3; the loss.* has 3 classes \(0 ... 2, or -100"
        ):
            trainer.step((batches[0][0], wrong))
        state = copy.deepcopy(trainer.state_dict())
        trainer.save_checkpoint(extra={"scheduler": scheduler.state_dict()})
        assert trainer.save_pretrained(tmp_path / "model").name == "model"
    assert noted.seen == ["step 0", "step 1", "loss accuracy", "step-2", "model"]
    losses = [found[0][0], found[1][0], validation["loss"]]
    assert json.loads((run / "tracked.json").read_text()) == [[1, losses[0]], [2, losses[1]], [2, losses[2]]]

    optimizer = groups(plain.named_parameters())
    reference = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for batch, (loss, rate) in zip(batches[:2], found, strict=True):
        optimizer.zero_grad()
        expected = F.cross_entropy(plain(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert rate == optimizer.param_groups[0]["lr"]
        reference.step()
    assert set(state["model"]) == set(plain.state_dict())
    assert set(state["optimizer"]) == set(dict(plain.named_parameters()))
    torch.testing.assert_close(state["model"], dict(plain.state_dict()))
    torch.testing.assert_close(load_file(tmp_path / "model" / "model.safetensors"), dict(plain.state_dict()))
    torch.testing.assert_close(outputs, plain(batch_of(5)[0]).detach())
    all_points = torch.cat([batch_of(5)[0], batch_of(2, seed=9)[0]])
    labels = torch.cat([batch_of(5)[1], batch_of(2, seed=9)[1]])
    assert validation["accuracy"] == pytest.approx((plain(all_points).argmax(1) == labels).float().mean().item())
    assert validation["loss"] == pytest.approx(F.cross_entropy(plain(all_points), labels).item(), rel=1e-5)

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert write_report(run).is_file()
    with pytest.raises(HeterodyneError, match="is not empty"):
        start(classifier(1))

    with start(classifier(1), resume=True) as again:
        assert again.steps_done == 2
        resumed = torch.optim.lr_scheduler.StepLR(again.optimizer, 1, gamma=0.5)
        resumed.load_state_dict(again.extra["scheduler"])
        for group, rate in zip(again.optimizer.param_groups, resumed.get_last_lr(), strict=True):
            group["lr"] = rate
        loss = again.step(batches[2]).loss
        weights = again.state_dict()["model"]
    assert loss == pytest.approx(F.cross_entropy(plain(batches[2][0]), batches[2][1]).item(), rel=1e-5)
    optimizer.zero_grad()
    F.cross_entropy(plain(batches[2][0]), batches[2][1]).backward()
    optimizer.step()
    torch.testing.assert_close(weights, dict(plain.state_dict()))
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 2, 3]

    def fails(*_: object) -> None:
        raise MemoryError("tried to allocate 2.00 GiB")

    again = start(classifier(1), resume=True)
    again.optimizer.register_step_pre_hook(fails)
    with pytest.raises(OutOfMemoryError, match="in step 3, in 0STEP"), again:
        again.step(batches[2])
    (shortage,) = read_shortages(run / "out-of-memory.jsonl")
    assert (shortage.step, shortage.asked_bytes) == (2, 2**31)
    note_shortage(run / "out-of-memory.jsonl", replace(shortage, used_bytes=1, free_bytes=0))
    with pytest.raises(InfeasibleError, match=r"no plan is left that asks for less:\n.*2 GiB were asked for"):
        start(classifier(1), resume=True)


class Head(nn.Module):
    """Says what it takes, and would take labels too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = classifier()

    def forward(self, points: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if labels is not None:
            raise ValueError("they were withheld")
        return {"logits": self.layers(points), "mean": points.mean()}


def weighted(outputs: dict[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    each = F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    return (each * batch["weights"]).mean()


def test_a_mapping_goes_to_the_model_as_far_as_it_names_it_and_to_the_loss_as_a_whole() -> None:
    model = Head()
    points, labels = batch_of(6)
    batch = {"points": points, "labels": labels, "weights": torch.arange(6.0)}
    expected = weighted(model(points), batch).item()
    with hd.distribute(
        model, batch, loss=hd.LossOptions(weighted, only=("labels",)), plan=hd.PlanOptions(measure_s=0.05)
    ) as trainer:
        results = [trainer.step(batch) for _ in range(3)]
        outputs = trainer.predict({"points": points})
    assert results[0].loss == pytest.approx(expected, rel=1e-5)
    assert {result.lr for result in results} == {OptimizerSection().lr}, "nobody said how long a schedule would be"
    torch.testing.assert_close(outputs["logits"], model(points)["logits"].detach())
    assert outputs["mean"] is None, "a mean has no row for each sample"


def test_what_a_criterion_cannot_take_is_told_in_words() -> None:
    points, labels = batch_of(6)
    with pytest.raises(CaptureError, match=r"nn\.CrossEntropyLoss takes an output and a target"):
        hd.distribute(Head(), {"points": points, "labels": labels}, loss=nn.CrossEntropyLoss())
    with pytest.raises(CaptureError, match="forward takes none of the batch's entries"):
        hd.distribute(Head(), {"images": points}, loss=weighted)
    with pytest.raises(CaptureError, match=r"LossOptions\(only=\) names label, and the batch has points"):
        hd.distribute(Head(), {"points": points}, loss=hd.LossOptions(weighted, only=("label",)))


def test_a_loss_that_reaches_around_the_module_for_a_parameter_is_refused_with_its_line() -> None:
    model, batch = classifier(), batch_of(6)

    def regularised(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels) + 0.01 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(CaptureError, match=r"(?s)test_own_loop.py.*p.square.*through a closure or a global"):
        hd.distribute(model, batch, loss=regularised)


class Reconstruction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, points: Tensor) -> Tensor:
        return (self.layer(points) - points).square().mean()


def test_a_bare_tensor_is_taken_as_it_is() -> None:
    points = batch_of(6)[0]
    for model, loss in ((Reconstruction(), None), (nn.Linear(4, 4), nn.MSELoss())):
        with hd.distribute(
            model, points, loss=loss, plan=hd.PlanOptions(measure_s=0.05), run=hd.RunOptions(weights_at_end="none")
        ) as trainer:
            expected = model(points) if loss is None else loss(model(points), points)
            assert trainer.evaluate(points[:5]) == pytest.approx(
                (model(points[:5]) if loss is None else loss(model(points[:5]), points[:5])).item(), rel=1e-5
            )
            assert trainer.step(points).loss == pytest.approx(expected.item(), rel=1e-5)
            if loss is None:
                with pytest.raises(HeterodyneError, match="nothing has a row for each sample"):
                    trainer.predict(points)
            with pytest.raises(CheckpointError, match="there is no run directory"):
                trainer.save_checkpoint()


class TimeFirst(nn.Module):
    """Outputs of [time, samples, classes], and one number for all."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.stack([self.line(x * number) for number in range(1, 5)])
        return steps, steps.mean()


@pytest.mark.parametrize("samples", [4, 1, 6])
def test_outputs_keep_the_dim_in_which_the_model_has_its_samples(samples: int) -> None:
    """Four steps of time and four samples cannot be told apart by their number."""
    model = TimeFirst()
    batch = batch_of(4)
    with hd.distribute(
        model,
        batch,
        loss=lambda outputs, target: F.cross_entropy(outputs[0][-1], target),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        plan=hd.PlanOptions(measure_s=0.05, check_s=0),
    ) as trainer:
        found, mean = trainer.predict(batch_of(samples)[0])
    with torch.no_grad():
        assert torch.allclose(found, model(batch_of(samples)[0])[0])
    assert mean is None


def test_an_optimizer_that_needs_whole_weights_refuses_a_split() -> None:
    with pytest.raises(HeterodyneError, match=r"needs whole weights.*take AdamW"):
        hd.distribute(classifier(), batch_of(4), loss=F.cross_entropy, optimizer=torch.optim.Adafactor, plan="split")


def test_an_optimizer_that_could_not_be_tried_is_told_as_that() -> None:
    model = classifier()
    why = r"could not be tried \(on small weights it fails: ValueError: it is made of other parameters.*is not known"
    with pytest.raises(HeterodyneError, match=f"(?s){why}.*of the parameters that it is given"):
        hd.distribute(
            model,
            batch_of(4),
            loss=F.cross_entropy,
            optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=0.1),
            plan="pipeline",
        )


def test_the_random_numbers_of_the_script_stay_what_they_are() -> None:
    """The order in which a loader shuffles is drawn after this call, on each rank."""
    model = classifier()
    before = torch.random.get_rng_state()
    with hd.distribute(
        model, batch_of(8), loss=nn.CrossEntropyLoss(), optimizer=groups, plan=hd.PlanOptions(measure_s=0.05)
    ) as trainer:
        trainer.step(batch_of(8))
        assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("given", [False, True])
def test_a_loop_whose_memory_ends_goes_on_from_what_was_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def losses(steps: range, plan: Path | str = "auto", *, resume: bool = False) -> list[float]:
        with hd.distribute(
            classifier(),
            batch_of(8),
            loss=nn.CrossEntropyLoss(),
            optimizer=sgd,
            plan=hd.PlanOptions(plan, measure_s=0.05, rehearsal_s=0, micro_batch_sizes=(4,)),
            run=hd.RunOptions(tmp_path / "run", resume=resume),
        ) as trainer:
            assert trainer.steps_done == steps.start
            average = trainer.average(0.5)
            found = [trainer.step(batch_of(8, seed)).loss for seed in steps]
            return [*found, average.validate([batch_of(8)])["loss"]]

    wanted = losses(range(6))
    shutil.rmtree(tmp_path / "run")
    whole = Worker.step

    def short(worker: Worker, batch: Any, step: int | None = None) -> StepResult:
        if worker.steps_done == 3:
            raise OutOfMemoryError("no room", rank=0, host="here")
        return whole(worker, batch, step)

    monkeypatch.setattr(Worker, "step", short)
    with pytest.raises(OutOfMemoryError):
        losses(range(6))
    monkeypatch.undo()
    again = tmp_path / "run" / "plan.json" if given else "auto"
    assert losses(range(3, 6), again, resume=True) == wanted[3:]


class Rows:
    """A dataset in memory."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, targets = batch_of(1, index)
        return {"input": inputs[0], "target": targets[0]}


@pytest.mark.parametrize("ends", ["a checkpoint", "memory", "memory, with a counter"])
def test_registered_objects_go_on_with_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Losses and rates are those of a loop that nothing has ended, after three of seven steps."""

    class Counter:
        steps = 0

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.steps = state["steps"]

    def loop(last: int, *, resume: bool = False) -> list[tuple[float, float, int]]:
        batches, counter = hd.batches(Rows(), global_batch_size=8, epochs=2, seed=3), Counter()
        found = []
        with hd.distribute(
            classifier(),
            batches.example(),
            loss=lambda output, batch: F.cross_entropy(output, batch["target"]),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            global_batch_size=8,
            plan=hd.PlanOptions(measure_s=0.05, rehearsal_s=0, micro_batch_sizes=(4,)),
            run=hd.RunOptions(tmp_path / "run", resume=resume),
        ) as trainer:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, gamma=0.5)
            trainer.register_for_checkpointing(scheduler=scheduler, batches=batches)
            if ends != "memory":
                trainer.register_for_checkpointing(counter=counter)
            for batch in batches:
                counter.steps += 1
                rate = trainer.optimizer.param_groups[0]["lr"]
                found.append((trainer.step(batch).loss, rate, counter.steps if ends == "a checkpoint" else 0))
                scheduler.step()
                if trainer.steps_done == last:
                    trainer.save_checkpoint()
                    break
            return found

    wanted = loop(7)
    shutil.rmtree(tmp_path / "run")
    if ends == "a checkpoint":
        assert loop(3) == wanted[:3]
        assert loop(7, resume=True) == wanted[3:]
        return
    whole = Worker.step

    def short(worker: Worker, batch: Any, step: int | None = None) -> StepResult:
        if worker.steps_done == 3:
            raise OutOfMemoryError("no room", rank=0, host="here")
        return whole(worker, batch, step)

    monkeypatch.setattr(Worker, "step", short)
    with pytest.raises(OutOfMemoryError):
        loop(7)
    monkeypatch.undo()
    # Of a counter nobody knows whether it has counted the step under way.
    assert loop(7, resume=True) == (wanted[3:] if ends == "memory" else wanted)


def test_what_has_no_state_is_not_registered() -> None:
    with (
        hd.distribute(
            classifier(), batch_of(8), loss=nn.CrossEntropyLoss(), plan=hd.PlanOptions(measure_s=0.05)
        ) as trainer,
        pytest.raises(CheckpointError, match=r"data is a list, which has no state_dict\(\): it cannot be kept"),
    ):
        trainer.register_for_checkpointing(data=[1])


def test_a_loop_is_told_that_it_shall_stop_and_can_save_what_it_has(tmp_path: Path) -> None:
    with hd.distribute(
        classifier(),
        batch_of(8),
        loss=nn.CrossEntropyLoss(),
        run=tmp_path / "run",
        plan=hd.PlanOptions(measure_s=0.05, rehearsal_s=0),
    ) as trainer:
        assert not trainer.should_stop
        for seed in range(8):
            if seed == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            trainer.step(batch_of(8, seed))
            if trainer.should_stop:
                trainer.save_checkpoint(extra={"seed": seed + 1})
                break
        assert trainer.steps_done == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_checkpoint_of_weights_that_give_no_loss_is_set_aside_in_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Worker.step

    def spoilt(worker: Worker, batch: Any, step: int | None = None) -> StepResult:
        result = whole(worker, batch, step)
        return replace(result, told=math.nan, found="the loss is not finite") if result.step >= 4 else result

    monkeypatch.setattr(Worker, "step", spoilt)
    with hd.distribute(
        classifier(),
        batch_of(8),
        loss=nn.CrossEntropyLoss(),
        run=tmp_path,
        plan=hd.PlanOptions(measure_s=0.05, rehearsal_s=0),
    ) as trainer:
        for seed in range(9):
            trainer.step(batch_of(8, seed))
            if seed in (1, 3):
                trainer.save_checkpoint(keep=1)
        with pytest.raises(NumericsError, match=r"newest checkpoint is of step 2.*load_checkpoint"):
            trainer.step(batch_of(8))
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-2", "step-4.not-finite"}
