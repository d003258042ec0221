"""Whatever stands in a file or a variable: it is taken for what it says, or refused in words. Nothing else may happen."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.profile import Profile
from heterodyne.cluster.written import cluster_from_json, cluster_to_json
from heterodyne.errors import HeterodyneError, JobError
from heterodyne.job import Job
from heterodyne.plan import Plan
from heterodyne.plan.schedules.csv_file import load_csv
from heterodyne.report.html import render
from heterodyne.report.run import load_run
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.timeline import Timeline
from pure.spoiled import VALUES, as_json, as_text, as_yaml
from report.synthetic_run import JOB, cluster, profile, write_run

CLUSTER = yaml.safe_load("""
name: lab
nodes:
  - {name: new, count: 2, devices: [{kind: A100-SXM-80GB, count: 4}], link: {bandwidth: 300 GB/s, latency: 5 us}}
  - {name: old, devices: [{kind: cpu, count: 8, memory: 16 GB}], link: null}
links:
  - {between: [new, old], bandwidth: 50 Gb/s, latency: 30 us}
  - {between: all, bandwidth: 25 GB/s, latency: 10 us}
""")
FLEET = yaml.safe_load("""
name: lab
prices: {T4: 0.35}
kinds: {own: {backend: cuda, peak_tflops: {bf16: 100}, memory: 16 GB, memory_bandwidth: 1 TB/s, link_bandwidth: 50 GB/s, watts: 300}}
regions:
  - name: us
    link: {bandwidth: 5 Gb/s, latency: 1 ms}
    zones:
      - {name: a, link: {bandwidth: 10 Gb/s, latency: 50 us}, nodes: [{name: t, count: 4, kind: T4, devices_per_node: 4, usd_per_hour: 2}]}
      - {name: b, nodes: [{kind: own, devices_per_node: 8, memory: 8 GB, spot: true, watts: 200}]}
links:
  - {between: regions, bandwidth: 1 Gb/s, latency: 30 ms, usd_per_gb: 0.02}
""")
OVERRIDES = (
    "training.steps",
    "optimizer.lr",
    "data.text",
    "model.arguments.width",
    "metrics.trackers",
    "parallelism.micro_batch_sizes",
)
VARIABLES = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "here",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_PROCID": "2",
    "SLURM_JOB_ID": "77", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]",
}  # fmt: skip
SCHEDULE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), steps=3, ranks=2)


def require_words(read: Callable[[], object]) -> None:
    """It is read, or refused with a message that a person can read and a terminal can show."""
    words = "nothing"
    try:
        read()
    except HeterodyneError as error:
        words = str(error)
    assert 5 < len(words) < 20_000
    words.encode("utf-8")  # a terminal takes it


def spoil(path: Path, chance: random.Random, write: Callable[[Any, random.Random], str], content: Any) -> None:
    path.write_bytes(write(content, chance).encode("utf-8", "surrogatepass"))


seeds = given(seed=st.integers(0, 2**32))
few = settings(max_examples=60)


@pytest.mark.parametrize(
    ("name", "load", "content"),
    [
        (
            "job.yaml",
            Job.load,
            yaml.safe_load(JOB) | {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "metrics": {"trackers": ["wandb"]}},
        ),
        ("cluster.yaml", load_cluster, CLUSTER),
        ("fleet.yaml", load_fleet, FLEET),
    ],
)
@few
@seeds
def test_what_people_write(
    tmp_path_factory: pytest.TempPathFactory, name: str, load: Callable[[Path], object], content: Any, seed: int
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    spoil(path, random.Random(seed), as_yaml, content)
    require_words(partial(load, path))


@few
@seeds
def test_overrides(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path, chance = tmp_path_factory.getbasetemp() / "job.yaml", random.Random(seed)
    path.write_text(JOB)
    value = yaml.safe_dump(chance.choice(VALUES)) if chance.random() < 0.5 else as_yaml(CLUSTER, chance)
    field = as_text(chance.choice(OVERRIDES), chance) if chance.random() < 0.3 else chance.choice(OVERRIDES)
    require_words(lambda: Job.load(path, (f"{field}={value}",)))


@few
@seeds
def test_plans(tmp_path_factory: pytest.TempPathFactory, run: Path, seed: int) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.json"
    spoil(path, random.Random(seed), as_json, json.loads((run / "plan.json").read_text()))
    require_words(lambda: Plan.load(path).dump())


@few
@seeds
def test_profiles_and_clusters_as_they_were_saved(
    tmp_path_factory: pytest.TempPathFactory, run: Path, seed: int
) -> None:
    path, chance = tmp_path_factory.getbasetemp() / "saved.json", random.Random(seed)
    profile(2, random.Random(0)).save(path)
    spoil(path, chance, as_json, json.loads(path.read_text()))
    require_words(partial(Profile.load, path))
    text = as_json(json.loads(cluster_to_json(cluster(2))), chance)
    require_words(partial(cluster_from_json, text))


@few
@seeds
def test_timelines_and_schedules(tmp_path_factory: pytest.TempPathFactory, run: Path, seed: int) -> None:
    path, chance = tmp_path_factory.getbasetemp() / "lines", random.Random(seed)
    lines = (run / "timeline-measured.jsonl").read_text().splitlines()[:8]
    place = chance.randrange(len(lines))
    lines[place] = as_json(json.loads(lines[place]), chance)
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    require_words(lambda: Timeline.load(path).to_perfetto())
    spoil(path, chance, as_text, SCHEDULE)
    require_words(partial(load_csv, path))


@few
@seeds
def test_variables(seed: int) -> None:
    chance = random.Random(seed)
    given = dict(chance.choice((VARIABLES, SLURM)))
    for name in chance.sample(sorted(given), 2):
        given[name] = str(chance.choice(VALUES))[:200] if chance.random() < 0.7 else as_text(given[name], chance)
    require_words(lambda: WorkerEnvironment.read(given))


@settings(max_examples=20)
@seeds
def test_the_report_of_a_run_with_a_spoiled_file(
    tmp_path_factory: pytest.TempPathFactory, run: Path, seed: int
) -> None:
    chance = random.Random(seed)
    spoiled = tmp_path_factory.mktemp("spoiled")
    for file in run.iterdir():
        if file.is_file():
            (spoiled / file.name).write_bytes(file.read_bytes())
    path = chance.choice(sorted(file for file in spoiled.iterdir() if file.suffix in (".json", ".jsonl", ".yaml")))
    content = path.read_text()
    if path.suffix == ".json" and chance.random() < 0.8:
        spoil(path, chance, as_json, json.loads(content))
    elif path.suffix == ".jsonl" and chance.random() < 0.8:
        lines = content.splitlines()
        place = chance.randrange(len(lines))
        lines[place] = as_json(json.loads(lines[place]), chance)
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    else:
        spoil(path, chance, as_text, content)
    require_words(lambda: render(load_run(spoiled)))


@pytest.mark.parametrize("load", [Job.load, load_cluster, load_fleet, Plan.load, load_csv])
def test_a_file_without_an_end_is_refused(load: Callable[[Path], object]) -> None:
    with pytest.raises((HeterodyneError, OSError), match=r"it is a device, and no regular file"):
        load(Path("/dev/zero"))


@pytest.mark.parametrize(
    "override",
    ["training.steps=yes", "optimizer.lr=true", "optimizer.betas=[true, 0.5]", "parallelism.micro_batch_sizes=[on]"],
)
def test_a_truth_value_is_no_number(tmp_path: Path, override: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(JobError, match=r"a truth value .* is no number"):
        Job.load(tmp_path / "job.yaml", (override,))
    assert Job.load(tmp_path / "job.yaml", ("data.packing=yes", "model.arguments.bias=true")).data.packing
