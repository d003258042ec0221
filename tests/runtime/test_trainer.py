"""The loop in one process: what is written, when it stops, how it goes on."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from heterodyne.errors import CheckpointError, NumericsError
from heterodyne.job import CheckpointSection, Job, MetricsSection
from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.checkpoint.export import WEIGHTS
from heterodyne.runtime.checkpoint.tensor_files import write_tensors
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.data.corpus import text_sources
from heterodyne.runtime.data.text import GlobalBatch, TextData
from heterodyne.runtime.data.tokens import open_tokens
from heterodyne.runtime.engine import Outcome
from heterodyne.runtime.records.metrics import StepRecord
from heterodyne.runtime.records.progress import Reporter
from heterodyne.runtime.step_result import StepResult
from heterodyne.runtime.trainer import Trainer

PLAN = Plan(
    model="m",
    cluster="c",
    global_batch_size=4,
    pipelines=(
        Pipeline(
            micro_batches=MicroBatches((4,)),
            stages=(Stage(ops=(0, 1), devices=("a/cpu:0",), regions=(Region(layout=Layout(shares=(1,))),)),),
        ),
    ),
)


def job(**training: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"factory": "tiny:build"},
            "data": {"sequence_length": 8, "validation_fraction": 0.1},
            "training": {"steps": 8, "global_batch_size": 4, "validate_every": 4, "validation_samples": 6, **training},
            "checkpoint": {"every": 3, "keep": 10},
            "metrics": {"tensorboard": False},
        }
    )


class Worker:
    """Trains on one device in plain PyTorch, with dropout, so that the state of the generators matters."""

    device = torch.device("cpu")
    borrowed_bytes = 0
    slowdowns: Any = SimpleNamespace(usual=dict)

    def __init__(self, on_step: Callable[[int], None] = lambda _: None) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Embedding(256, 8), nn.Dropout(0.2), nn.Linear(8, 256))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.steps_done = 0
        self.state = self
        self.on_step = on_step
        self.faults: dict[int, str] = {}
        self.spoilt: str | None = None

    def _loss(self, batch: GlobalBatch) -> torch.Tensor:
        ids = batch.samples(0, batch.size)["input_ids"]
        return F.cross_entropy(self.module(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def step(self, batch: GlobalBatch) -> StepResult:
        self.module.train()
        self.optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        self.steps_done += 1
        fault = self.faults.get(self.steps_done)
        if fault is None:
            self.optimizer.step()
        self.on_step(self.steps_done)
        return StepResult(
            step=self.steps_done - 1,
            told=loss.item() if fault is None else math.nan,
            lr=1e-2,
            samples=batch.size,
            count=batch.size,
            seconds=0.0,
            norm=torch.ones(()),
            found=fault,
        )

    def finish(self) -> None:
        """Each step has ended already."""

    def evaluate_sum(self, batch: GlobalBatch) -> tuple[float, float]:
        self.module.eval()
        with torch.no_grad():
            return self._loss(batch).item() * batch.size, batch.size

    def needs(self, keys: Any) -> bool:
        return True

    def not_finite(self) -> str | None:
        return self.spoilt

    def weights(self) -> Any:
        return self.module.state_dict()

    def own(self) -> Any:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps_done}

    def load_state_dict(self, state: Any) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_done = state["steps"]


class Notes(Reporter):
    def __init__(self) -> None:
        super().__init__(8)
        self.said: list[str] = []
        self.steps: list[int] = []
        self.closed = False

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record.step)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def data(tmp_path: Path) -> TextData:
    (tmp_path / "text").write_text("".join(f"line {number}\n" for number in range(200)))
    return read(tmp_path)


def read(folder: Path) -> TextData:
    file = open_tokens(text_sources(str(folder / "text")), folder / "cache", say=lambda _: None)
    return TextData(file=file, sequence_length=8, validation_fraction=0.1, batch_size=4, seed=0)


def trainer(
    run: Path, data: TextData, *, job: Job, worker: Worker | None = None, notes: Notes | None = None, sites: Any = None
) -> Trainer:
    return Trainer(
        worker=worker or Worker(),  # type: ignore[arg-type]
        data=data,
        job=job,
        plan=PLAN,
        run=RunDirectory(run),
        agreement=Agreement.of_all(),
        reporter=notes or Notes(),
        ideal_samples_per_s=1e9,
        sites=sites,
    )


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, str, float]]:
    """Every loss with its step and its kind; equal lists mean equal runs, bit for bit."""
    return [
        (line["step"], kind, line[kind]) for line in lines(run) for kind in ("loss", "validation_loss") if kind in line
    ]


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoint").iterdir())


@pytest.fixture
def undisturbed(tmp_path: Path, data: TextData) -> tuple[Path, Outcome]:
    (tmp_path / "undisturbed").mkdir()
    return tmp_path / "undisturbed", trainer(tmp_path / "undisturbed", data, job=job()).train()


def test_a_run_leaves_its_metrics_and_checkpoints(undisturbed: tuple[Path, Outcome]) -> None:
    run, outcome = undisturbed
    steps = [line for line in lines(run) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["step"] for line in lines(run) if "validation_loss" in line] == [4, 8]
    for line in steps:
        assert line["samples_per_s"] == pytest.approx(4 / line["step_s"])
        assert line["tokens_per_s"] == pytest.approx(8 * line["samples_per_s"])
        assert line["efficiency"] == pytest.approx(line["samples_per_s"] / 1e9)
    assert checkpoints(run) == [3, 6, 8]
    assert outcome.steps == 8
    assert outcome.loss == steps[-1]["loss"]
    assert outcome.validation_loss == lines(run)[-1]["validation_loss"]
    assert not outcome.interrupted
    assert outcome.peak_memory_bytes[0] > 0


def test_two_runs_of_a_job_are_equal(tmp_path: Path, data: TextData, undisturbed: tuple[Path, Outcome]) -> None:
    (tmp_path / "again").mkdir()
    trainer(tmp_path / "again", data, job=job()).train()
    assert losses(tmp_path / "again") == losses(undisturbed[0])


@pytest.mark.parametrize("at", [1, 2, 3, 5, 7])
def test_killed_and_resumed_a_run_has_the_losses_of_an_undisturbed_one(
    at: int, tmp_path: Path, data: TextData, undisturbed: tuple[Path, Outcome]
) -> None:
    class Killed(BaseException):
        pass

    def kill(step: int) -> None:
        if step == at:
            raise Killed

    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(Killed):
        trainer(run, data, job=job(), worker=Worker(kill)).train()
    torch.manual_seed(99)
    again, notes = Worker(), Notes()
    resumed = trainer(run, data, job=job(), worker=again, notes=notes)
    assert resumed.resume() == (at - 1) // 3 * 3
    assert resumed.train().steps == 8
    assert losses(run) == losses(undisturbed[0])
    assert ("resuming after step" if at > 3 else "starts from its beginning") in notes.said[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_ends_the_step_writes_a_checkpoint_and_can_go_on(
    number: signal.Signals, tmp_path: Path, data: TextData, undisturbed: tuple[Path, Outcome]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    notes = Notes()
    worker = Worker(lambda step: os.kill(os.getpid(), number) if step == 5 else None)
    before = signal.getsignal(number)
    outcome = trainer(run, data, job=job(), worker=worker, notes=notes).train()
    assert outcome.interrupted
    assert outcome.steps == 5
    assert checkpoints(run) == [3, 5]
    assert notes.closed
    assert signal.getsignal(number) == before
    resumed = trainer(run, data, job=job())
    assert resumed.resume() == 5
    assert not resumed.train().interrupted
    assert losses(run) == losses(undisturbed[0])


@pytest.mark.parametrize(
    "rooms", [{3: False, 6: False, 8: True}, {3: False, 6: True, 8: True}, {3: True, 6: True, 8: False}]
)
def test_a_full_disk_costs_a_checkpoint_and_a_line_but_for_the_last_one(
    rooms: dict[int, bool], tmp_path: Path, data: TextData, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def write(directory: Path, *arguments: Any) -> Any:
        if not rooms[int(directory.name.partition("-")[2].partition(".")[0])]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_tensors(directory, *arguments)

    monkeypatch.setattr("heterodyne.runtime.checkpoint.checkpoints.write_tensors", write)
    notes = Notes()
    training = trainer(run, data, job=job(), notes=notes)
    if rooms[8]:
        assert training.train().steps == 8
    else:
        with pytest.raises(CheckpointError, match="No space left on device"):
            training.train()
    assert checkpoints(run) == [step for step, room in rooms.items() if room]
    lost = [step for step, room in rooms.items() if not room and step != 8]
    told = [line for line in notes.said if "Training goes on" in line]
    assert len(told) == len(lost)
    assert all(
        f"the checkpoint of step {step} cannot be written" in line for step, line in zip(lost, told, strict=True)
    )


def test_more_failed_checkpoints_in_a_row_than_may_be_end_the_run(
    tmp_path: Path, data: TextData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("heterodyne.runtime.checkpoint.checkpoints.write_tensors", full)
    (tmp_path / "run").mkdir()
    worker = Worker()
    few = job().model_copy(update={"checkpoint": CheckpointSection(every=2, max_failed=1)})
    with pytest.raises(CheckpointError, match="of step 4"):
        trainer(tmp_path / "run", data, job=few, worker=worker).train()
    assert worker.steps_done == 4


def test_a_finished_run_has_nothing_left_to_do(data: TextData, undisturbed: tuple[Path, Outcome]) -> None:
    run, _ = undisturbed
    before = losses(run)
    again = trainer(run, data, job=job())
    assert again.resume() == 8
    outcome = again.train()
    assert (outcome.steps, outcome.loss, outcome.interrupted) == (8, None, False)
    assert losses(run) == before


def test_the_weights_are_exported_as_they_are(tmp_path: Path, data: TextData) -> None:
    (tmp_path / "run").mkdir()
    worker = Worker()
    trained = trainer(tmp_path / "run", data, job=job(), worker=worker)
    trained.train()
    loaded = load_file(trained.export() / WEIGHTS)
    assert loaded.keys() == worker.module.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in worker.module.state_dict().items())


def test_another_job_or_other_text_is_refused_by_field(
    tmp_path: Path, data: TextData, undisturbed: tuple[Path, Outcome]
) -> None:
    run, _ = undisturbed
    with pytest.raises(CheckpointError, match=r"job\.training\.seed: 0 there, 5 here"):
        trainer(run, data, job=job(seed=5)).resume()
    (tmp_path / "text").write_text("other text " * 200)
    with pytest.raises(CheckpointError, match=r"data\.tokens"):
        trainer(run, read(tmp_path), job=job()).resume()


def test_other_ways_to_keep_and_report_are_no_other_job(data: TextData, undisturbed: tuple[Path, Outcome]) -> None:
    changed = job().model_copy(update={"checkpoint": job().checkpoint.model_copy(update={"every": 1})})
    assert trainer(undisturbed[0], data, job=changed).resume() == 8


def test_a_site_that_joins_others_at_their_end_is_validated(tmp_path: Path, data: TextData) -> None:
    worker, wanted = Worker(), job()

    def begin() -> None:
        worker.steps_done = wanted.training.steps

    sites = SimpleNamespace(begin=begin, notes=list, settle=lambda: None, state_dict=dict, close=lambda: None)
    outcome = trainer(tmp_path, data, job=wanted, worker=worker, sites=sites).train()
    assert outcome.validation_loss is not None
    assert [kind for _, kind, _ in losses(tmp_path)] == ["validation_loss"]


def test_a_run_can_be_extended_and_validated_otherwise_but_not_with_another_schedule(
    data: TextData, undisturbed: tuple[Path, Outcome]
) -> None:
    run, _ = undisturbed
    before = losses(run)
    longer = job(steps=10, validate_every=9, validation_samples=3)
    with pytest.raises(CheckpointError, match=r"job\.optimizer\.schedule_steps: 8 there, 10 here"):
        trainer(run, data, job=longer).resume()
    extended = trainer(run, data, job=longer.continuing(job().decisive))
    assert extended.resume() == 8
    assert extended.train().steps == 10
    assert losses(run)[: len(before)] == before
    assert [(step, kind) for step, kind, _ in losses(run)[len(before) :]] == [
        (9, "loss"), (9, "validation_loss"), (10, "loss"), (10, "validation_loss")
    ]  # fmt: skip


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoint").iterdir())


def test_a_skipped_step_is_said_and_training_goes_on(tmp_path: Path, data: TextData) -> None:
    worker, notes = Worker(), Notes()
    worker.faults = {3: "the loss is nan", 4: "the loss is nan"}
    outcome = trainer(tmp_path, data, job=job(), worker=worker, notes=notes).train()
    assert outcome.steps == 8
    assert [text for text in notes.said if "skipped" in text] == [
        f"step {step} was skipped, nothing was updated: the loss is nan" for step in (3, 4)
    ]
    assert [line["loss"] for line in lines(tmp_path) if line["step"] == 3] == [None]
    assert checkpoints(tmp_path) == [6, 8], "of step 3 there is none: nothing says that its weights are good"


def test_steps_that_stay_without_a_finite_loss_end_the_run_and_its_last_good_state_stays(
    tmp_path: Path, data: TextData
) -> None:
    """Step 6 makes weights that give no finite loss any more, after which it is saved: that checkpoint is none to go on from."""
    worker = Worker()
    worker.faults = dict.fromkeys((7, 8), "the weights of h.0 are not finite")
    job_ = job(max_skipped_steps=1)
    job_ = job_.model_copy(update={"checkpoint": job_.checkpoint.model_copy(update={"keep": 1})})
    with pytest.raises(
        NumericsError, match=r"steps 7 to 8 were skipped.*h\.0.*newest checkpoint is of step 3.*--resume"
    ):
        trainer(tmp_path, data, job=job_, worker=worker).train()
    assert names(tmp_path) == ["step-3", "step-6.not-finite"]
    again = trainer(tmp_path, data, job=job_)
    assert again.resume() == 3
    assert again.train().steps == 8
    assert "step-8" in names(tmp_path)


def test_a_state_that_is_not_finite_takes_no_place(tmp_path: Path, data: TextData) -> None:
    worker = Worker()
    worker.on_step = lambda step: setattr(worker, "spoilt", "head.weight" if step == 6 else None)
    with pytest.raises(NumericsError, match=r"after step 6 head\.weight is not finite.*checkpoint is of step 3"):
        trainer(tmp_path, data, job=job(), worker=worker).train()
    assert names(tmp_path) == ["step-3"]


def test_a_run_whose_last_step_was_skipped_does_not_end_as_if_all_were_well(tmp_path: Path, data: TextData) -> None:
    worker = Worker()
    worker.faults = {8: "the loss is inf"}
    with pytest.raises(NumericsError, match=r"step 8 was skipped.*checkpoint is of step 6"):
        trainer(tmp_path, data, job=job(), worker=worker).train()


@pytest.mark.parametrize("fault", ["threading.Event().wait()", "raise RuntimeError('no more')"])
def test_a_tracker_that_hangs_or_raises_costs_a_warning_and_no_bit_of_the_run(
    fault: str, tmp_path: Path, data: TextData, undisturbed: tuple[Path, Outcome]
) -> None:
    (tmp_path / "bad.py").write_text(f"import threading\ndef bad(opening):\n    {fault}\n")
    (tmp_path / "run").mkdir()
    trackers = [{"custom": {"factory": f"{tmp_path / 'bad.py'}:bad"}}]
    metrics = MetricsSection.model_validate({"tensorboard": False, "trackers": trackers, "flush_s": 2.0})
    notes = Notes()
    wanted = job().model_copy(update={"metrics": metrics})
    trainer(tmp_path / "run", data, job=wanted, notes=notes).train()
    (warning,) = [text for text in notes.said if text.startswith("warning:")]
    assert "tracker custom" in warning
    assert losses(tmp_path / "run") == losses(undisturbed[0])
    assert checkpoints(tmp_path / "run") == [3, 6, 8]


class Speeds:
    """What steps take, as `Slowdowns` keeps it: whether it was told of a number, or to find out anew."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.own, self.expected, self.resets = own, None, 0

    def usual(self) -> dict[str, Any]:
        return self.own

    def expect(self, usual: Any) -> None:
        self.expected = usual["pace_s"]

    def reset(self) -> None:
        self.resets += 1


@pytest.mark.parametrize("kept", ['[{"pace_s": 0.25}]', "[{}]", "{", None])
def test_a_resume_under_the_same_plan_expects_the_speeds_of_before(
    tmp_path: Path, data: TextData, kept: str | None
) -> None:
    worker, run = Worker(), tmp_path / "run"
    run.mkdir()
    worker.slowdowns = Speeds({} if kept is None else {"pace_s": 0.5})
    trainer(run, data, job=job(), worker=worker).train()
    assert (run / "speeds.json").exists() == (kept is not None)
    if kept is not None:
        (run / "speeds.json").write_text(kept)
    for same_plan in (False, True):
        worker = Worker()
        worker.slowdowns = Speeds({})
        trainer(run, data, job=job(), worker=worker).resume(same_plan=same_plan)
        known = same_plan and kept is not None and "pace_s" in kept
        assert worker.slowdowns.expected == (0.25 if known else None)
        assert worker.slowdowns.resets == (same_plan and not known), "all ranks find out anew, or none does"
