"""Faults in a row, each resumed: the losses and the weights of a run that was left alone, bit for bit, under plans of three kinds.

Workers and their launcher are killed, stopped and signalled, in steps and while a checkpoint is written, under a data, a pipeline and a
split plan of two workers: nine faults under each, with --all 27. After each fault everything must end by itself, without a traceback.
"""

from __future__ import annotations

import hashlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml
from results import ROOT, Results, arguments, spread

sys.path.insert(0, str(ROOT / "tests"))

from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Region, Stage
from multiprocess.cli_job import CLUSTER, JOB, Place, make_place, worker

BATCH, CHECKPOINT_EVERY = 8, 10
ENDING_S = 90.0  # in which a fault must have ended everything; a stopped worker is noticed after a while of silence
Victims = Callable[[subprocess.Popen[str], random.Random], list[psutil.Process]]


def one_worker(process: subprocess.Popen[str], draw: random.Random) -> list[psutil.Process]:
    return [worker(process, draw.randrange(2))]


def launcher(process: subprocess.Popen[str], _: random.Random) -> list[psutil.Process]:
    return [psutil.Process(process.pid)]


def everyone(process: subprocess.Popen[str], _: random.Random) -> list[psutil.Process]:
    above = psutil.Process(process.pid)
    return [above, *above.children(recursive=True)]


FAULTS: dict[str, tuple[Victims, tuple[signal.Signals, ...]]] = {
    "a worker is killed": (one_worker, (signal.SIGKILL,)),
    "the launcher is killed": (launcher, (signal.SIGKILL,)),
    "a worker is stopped": (one_worker, (signal.SIGSTOP,)),
    "the launcher has Ctrl-C": (launcher, (signal.SIGINT,)),
    "a worker has SIGTERM": (one_worker, (signal.SIGTERM,)),
    "all are killed at once": (everyone, (signal.SIGKILL,)),
    "the launcher is stopped, then killed": (launcher, (signal.SIGSTOP, signal.SIGKILL)),
    "a worker has Ctrl-C": (one_worker, (signal.SIGINT,)),
    "the launcher has SIGTERM": (launcher, (signal.SIGTERM,)),
}


def main() -> int:
    options = arguments(__doc__, seed=0, whole="27 faults under each plan, and not 9", names=("--plans", tuple(PLANS)))
    results = Results("chain_of_faults")
    faults = list(FAULTS)[:2] if options.quick else list(FAULTS) * (3 if options.all else 1)
    plans = options.plans[-2:] if options.quick else options.plans
    steps = 60 * (len(faults) + 1)
    survived = different = left = tracebacks = 0
    with tempfile.TemporaryDirectory(prefix="chain-") as name:
        place = prepared(Path(name), steps)
        for kind in plans:
            chain = Chain(place, kind, random.Random(f"{options.seed} {kind}"))
            chain.undisturbed()
            for number, fault in enumerate(faults):
                chain.suffer(fault, in_checkpoint=number % 2 == 1)
            losses, weights = chain.finish()
            results.row(
                kind, faults=len(faults), steps=steps, losses_that_differ=losses, weights_equal=weights, statuses=str(chain.statuses),
                ended_s=spread(chain.ended_s), undisturbed_s=chain.undisturbed_s,
            )  # fmt: skip
            survived += len(faults)
            different += losses + (not weights)
            left += chain.left
            tracebacks += chain.tracebacks
    results.bar("faults survived", survived, f">= {len(faults) * len(plans)}")
    results.bar("losses and exported weights that differ in any bit", different, "<= 0")
    results.bar("faults after which a process was left", left, "<= 0")
    results.bar("faults with a traceback", tracebacks, "<= 0")
    return results.write(options.json)


def prepared(folder: Path, steps: int) -> Place:
    """The directory of the job, with a plan of each kind."""
    place = make_place(folder)
    content = yaml.safe_load(JOB)
    content["training"] |= {"steps": steps, "validate_every": 0}
    content["checkpoint"] = {"every": CHECKPOINT_EVERY}
    (folder / "job.yaml").write_text(yaml.safe_dump(content))
    (folder / "two.yaml").write_text(CLUSTER)
    graph = captured(folder)
    cluster = load_cluster(folder / "two.yaml")
    for kind, make in PLANS.items():
        make(graph, cluster).save(folder / f"{kind}.json")
    return place


def captured(folder: Path) -> ModelGraph:
    import torch

    from heterodyne.frontend import trace
    from heterodyne.models import build

    job = Job.load(folder / "job.yaml")
    tokens = torch.zeros(4, job.data.sequence_length, dtype=torch.int64)
    return trace(build(job.model, base=folder, device="meta"), {"input_ids": tokens, "labels": tokens}).graph


def data(graph: ModelGraph, cluster: Cluster) -> Plan:
    """Samples 5 to 3."""
    pipelines = [(share, (Stage(ops=(0, len(graph.ops)), devices=(device.id,), regions=ALONE),))
                 for share, device in zip((5, 3), cluster.devices, strict=True)]  # fmt: skip
    return plan_of(graph, cluster, pipelines)


def pipeline(graph: ModelGraph, cluster: Cluster) -> Plan:
    """Two stages, four micro-batches."""
    cut = len(graph.ops) // 2
    first, second = cluster.devices
    stages = (
        Stage(ops=(0, cut), devices=(first.id,), regions=ALONE),
        Stage(ops=(cut, len(graph.ops)), devices=(second.id,), regions=ALONE),
    )
    return plan_of(graph, cluster, [(BATCH, stages)])


def split(graph: ModelGraph, cluster: Cluster) -> Plan:
    """Every layer 5 to 3."""
    region = Region(layout=Layout(kind="split", shares=(5, 3)))
    names = tuple(device.id for device in cluster.devices)
    return plan_of(graph, cluster, [(BATCH, (Stage(ops=(0, len(graph.ops)), devices=names, regions=(region,)),))])


ALONE = (Region(layout=Layout(shares=(1,))),)
PLANS: dict[str, Callable[[ModelGraph, Cluster], Plan]] = {"data": data, "pipeline": pipeline, "split": split}


def plan_of(graph: ModelGraph, cluster: Cluster, pipelines: list[tuple[int, tuple[Stage, ...]]]) -> Plan:
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=BATCH,
        pipelines=tuple(
            Pipeline(micro_batches=MicroBatches.of_samples(share, 2), stages=stages) for share, stages in pipelines
        ),
    )


class Chain:
    """One run under one plan, disturbed again and again, beside one that is left alone."""

    def __init__(self, place: Place, kind: str, draw: random.Random) -> None:
        self._place, self._kind, self._draw = place, kind, draw
        self._run = f"{kind}-disturbed"
        self.statuses: list[int] = []
        self.ended_s: list[float] = []
        self.left = self.tracebacks = 0
        self.undisturbed_s = 0.0

    def undisturbed(self) -> None:
        started = time.perf_counter()
        process = self._start(f"{self._kind}-alone")
        said, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(said)
        self.undisturbed_s = time.perf_counter() - started

    def suffer(self, fault: str, *, in_checkpoint: bool) -> None:
        """Let the run go on for a while, let the fault happen, and wait until everything has ended."""
        process = self._start(self._run)
        self._wait(process, self._draw.randrange(2, 25))
        while in_checkpoint and not list((self._place.path / self._run / "checkpoint").glob("*.partial-*")):
            if process.poll() is not None:
                raise RuntimeError(process.communicate()[0])
        all_of_it = everyone(process, self._draw)
        victims, signals = FAULTS[fault]
        chosen = victims(process, self._draw)
        started = time.perf_counter()
        for number in signals:
            for each in chosen:
                each.send_signal(number)
        gone, alive = psutil.wait_procs(all_of_it, timeout=ENDING_S)
        self.ended_s.append(time.perf_counter() - started)
        for each in alive:
            each.kill()
        said, _ = process.communicate()
        self.left += bool(alive)
        self.tracebacks += "Traceback" in said
        status = next((each.returncode for each in gone if each.pid == process.pid), process.returncode)
        self.statuses.append(status)
        print(
            f"{self._kind}: {fault} {'while a checkpoint is written' if in_checkpoint else 'in a step'}, at step {self._step()}: "
            f"status {status} after {self.ended_s[-1]:.1f} s{', PROCESSES LEFT' if alive else ''}",
            flush=True,
        )
        if alive or "Traceback" in said:
            print(said[-3000:], flush=True)

    def finish(self) -> tuple[int, bool]:
        """How many losses differ, and whether the exported weights are equal."""
        process = self._start(self._run)
        said, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(said)
        expected, got = (self._place.losses(run) for run in (f"{self._kind}-alone", self._run))
        different = sum(expected.get(at) != got.get(at) for at in expected.keys() | got.keys())
        exported = [
            hashlib.sha256((self._place.path / run / "model" / "model.safetensors").read_bytes()).hexdigest()
            for run in (f"{self._kind}-alone", self._run)
        ]
        return different, exported[0] == exported[1]

    def _start(self, run: str) -> subprocess.Popen[str]:
        resume = ["--resume"] if (self._place.path / run / "checkpoint").is_dir() else ["--plan", f"{self._kind}.json"]
        return self._place.start("train", "job.yaml", "--cluster", "two.yaml", "--run-dir", run, *resume)

    def _wait(self, process: subprocess.Popen[str], steps: int) -> None:
        """Until so many steps more are done, and there is a checkpoint to resume from."""
        begun, checkpoints = self._step(), self._place.path / self._run / "checkpoint"
        while self._step() < begun + steps or not list(checkpoints.glob("step-*[0-9]")):
            if process.poll() is not None:
                raise RuntimeError(process.communicate()[0])
            time.sleep(0.005)

    def _step(self) -> int:
        metrics = self._place.path / self._run / "metrics.jsonl"
        steps = re.findall(r'^\{"step": (\d+),', metrics.read_text() if metrics.exists() else "", re.MULTILINE)
        return int(steps[-1]) if steps else 0


if __name__ == "__main__":
    sys.exit(main())
