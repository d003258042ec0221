"""``heterodyne simulate`` as a user runs it: on devices that are not here, with plans edited by hand and schedules from files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from heterodyne.cli import main
from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.spec import Cluster
from heterodyne.cluster.written import cluster_to_json
from heterodyne.frontend import trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.models import build
from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.csv_file import format_csv
from heterodyne.timeline import Timeline
from multiprocess.cli_job import make_place
from pure.build import linear, profile

MICRO_BATCHES = 8
CLUSTER = """
name: three
nodes:
  - name: far
    devices: [{kind: cpu, count: 2, memory: 4 GiB}, {kind: cpu, memory: 4 GiB}]
    link: {bandwidth: 1 GB/s, latency: 50 us}
"""
SIMULATE = ("simulate", "plan", "--job", "job.yaml")


def pipeline(graph: ModelGraph, cluster: Cluster, starts: tuple[int, ...]) -> Plan:
    """Stages that begin at these ops, on the devices in turn."""
    ends = (*starts[1:], len(graph.ops))
    names = [device.id for device in cluster.devices]
    held = [names[number % len(names)] for number in range(len(starts))]
    alone = (Region(layout=Layout(shares=(1,))),)
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=MICRO_BATCHES,
        pipelines=(
            Pipeline(
                micro_batches=MicroBatches.of_samples(MICRO_BATCHES, 1),
                stages=tuple(
                    Stage(ops=ops, devices=(device,), regions=alone)
                    for ops, device in zip(zip(starts, ends, strict=True), held, strict=True)
                ),
            ),
        ),
        idle=tuple(name for name in names if name not in held),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, and beside it the directory ``plan``: a pipeline of three stages, its cluster, and what was measured there."""
    path = make_place(tmp_path_factory.mktemp("simulate")).path
    (path / "three.yaml").write_text(CLUSTER)
    cluster = load_cluster(path / "three.yaml")
    model = build(Job.load(path / "job.yaml").model, base=path, device="meta")
    tokens = torch.zeros(2, 16, dtype=torch.long)
    graph = trace(model, {"input_ids": tokens, "labels": tokens}).graph
    known = path / "plan"
    known.mkdir()
    pipeline(graph, cluster, (0, 2, len(graph.ops) - 3)).save(known / "plan.json")
    (known / "cluster.json").write_text(cluster_to_json(cluster))
    profile(graph, cluster, [linear(1e-3), linear(2e-3), linear(4e-3)]).save(known / "profile.json")
    return path


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)


def edited(change: Callable[[dict[str, object]], None]) -> None:
    """A plan beside the one that was made, changed as by hand."""
    plan = json.loads(Path("plan/plan.json").read_text())
    change(plan)
    Path("plan/edited.json").write_text(json.dumps(plan))


def test_it_prints_the_figures_draws_the_step_and_writes_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*SIMULATE, "--out", "step.jsonl")) == 0
    said = capsys.readouterr().out
    for words in ("samples/s", "no step of this plan is shorter", "bubble", "One step, as simulated"):
        assert words in said, words
    assert said.count("far/cpu:") == 6, "a row of the table and one of the drawing for each device"
    timeline = Timeline.load(Path("step.jsonl"))
    assert {event.kind for event in timeline.events} >= {"F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "STEP"}
    trace_events = json.loads(Path("step.trace.json").read_text())["traceEvents"]
    assert len([event for event in trace_events if event["ph"] == "X"]) == len(timeline.events)


def test_the_directory_of_a_run_knows_what_else_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("alone").mkdir(exist_ok=True)
    Path("alone/plan.json").write_text(Path("plan/plan.json").read_text())
    given = ("--cluster", "three.yaml", "--profile", "plan/profile.json")
    assert main((*SIMULATE, "--out", "a.jsonl")) == 0
    of_run = capsys.readouterr().out
    assert main(("simulate", "alone/plan.json", "--job", "job.yaml", *given, "--out", "b.jsonl")) == 0
    assert capsys.readouterr().out == of_run
    assert Path("a.jsonl").read_text() == Path("b.jsonl").read_text()


def test_a_run_needs_no_job_and_finds_what_its_job_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*SIMULATE, "--out", "a.jsonl")) == 0
    of_job = capsys.readouterr().out
    shutil.copytree("plan", "elsewhere/run")
    given = Path("job.yaml").read_text()
    Path("elsewhere/run/job.yaml").write_text(given + f"relative_to: {Path.cwd()}\n")
    assert main(("simulate", "elsewhere/run", "--out", "b.jsonl")) == 0
    assert capsys.readouterr().out == of_job
    assert main(("simulate", "plan/plan.json")) == 2
    assert "no job.yaml is beside it: name the job with --job" in capsys.readouterr().err


def test_a_schedule_by_name_or_from_a_file_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    Path("zb.csv").write_text(format_csv(SCHEDULES["ZBH1"].orders(3, 1, MICRO_BATCHES)))
    said = []
    for schedule in ("ZBH1", "zb.csv", "1F1B"):
        assert main((*SIMULATE, "--schedule", schedule)) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_a_schedule_with_a_missing_backward_is_drawn_with_the_fault(capsys: pytest.CaptureFixture[str]) -> None:
    orders = SCHEDULES["1F1B"].orders(3, 1, MICRO_BATCHES)
    broken = (orders[0], tuple(a for a in orders[1] if str(a) != "1B4"), orders[2])
    Path("missing.csv").write_text(format_csv(broken))
    assert main((*SIMULATE, "--schedule", "missing.csv")) == 2
    said = capsys.readouterr().err
    assert "error: missing.csv: pipeline 0 cannot run in this order" in said
    assert "place 1: 1B4 is missing: run it, or its halves I and W" in said
    (row,) = [line for line in said.splitlines() if ">1F4<" in line]
    assert row.startswith("place 1 |")
    assert max(map(len, said.splitlines())) <= 120


def test_a_plan_that_needs_more_memory_than_there_is_tells_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    small = CLUSTER.replace("count: 2, memory: 4 GiB}", "memory: 4 GiB}, {kind: cpu, memory: 1 MiB}")
    Path("tight.yaml").write_text(small)
    edited(lambda plan: plan.update(cluster=load_cluster(Path("tight.yaml")).fingerprint))
    assert main(("simulate", "plan/edited.json", "--job", "job.yaml", "--cluster", "tight.yaml")) == 2
    said = capsys.readouterr()
    assert "LACKS" in said.out
    assert "far/cpu:1 (stage 1) needs" in said.err
    assert "lacks" in said.err
    assert "recompute" in said.err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda plan: plan["pipelines"][0]["stages"][1].update(ops=[1, plan["pipelines"][0]["stages"][1]["ops"][1]]),
            "pipeline 0 stage 1 runs ops 1 to",
        ),
        (
            lambda plan: plan["pipelines"][0]["stages"].append(dict(plan["pipelines"][0]["stages"][0], ops=[99, 99])),
            "pipeline 0 stage 3 runs ops 99 to 99",
        ),
        (lambda plan: plan.update(schedule="2F2B"), "schedule '2F2B' is not known; it can be GPipe"),
        (lambda plan: plan["pipelines"][0].update(order=["0F0", "x", ""]), "'x' is not an action"),
        (lambda plan: plan["pipelines"][0].update(order=["0F0", "", ""]), "place 0: 0B0 is missing"),
        (lambda plan: plan.update(model="another"), "it was made for another model"),
        (lambda plan: plan["pipelines"][0]["stages"][2].update(devices=["far/cpu:7"]), "'far/cpu:7' is not in the cluster"),
    ],
    ids=["cut twice", "more stages than ops", "schedule", "no action", "missing", "model", "device"],
)  # fmt: skip
def test_a_plan_that_cannot_run_is_told(
    change: Callable[[dict[str, object]], None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(change)
    assert main(("simulate", "plan/edited.json", "--job", "job.yaml")) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert told in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--schedule", "2F2B"), "--schedule 2F2B: neither a CSV file nor a schedule; it can be GPipe"),
        (("--schedule", "nowhere.csv"), "nowhere.csv: cannot be read"),
        (("--schedule", "job.yaml"), "is not an action"),
        (("--schedule", "two.csv"), "two.csv: has 2 rows, the pipelines of the plan have 3 places"),
        (("--out", "no/step.jsonl"), "--out no/step.jsonl: there is no directory no"),
        (("--profile", "nowhere.json"), "nowhere.json"),
    ],
    ids=" ".join,
)
def test_a_mistake_in_the_arguments_is_told(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("two.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert main((*SIMULATE, *arguments)) == 2
    assert told in capsys.readouterr().err
