"""What is written for schedulers starts each process of a cluster file once, with the rank that the file gives it."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cli.app import run
from heterodyne.cluster import Cluster, Device
from heterodyne.errors import ClusterError, HeterodyneError
from heterodyne.submit import SCHEDULERS, Launch
from heterodyne.submit.groups import bundle_of, groups_of

KINDS = ("A100-SXM4-80GB", "V100-SXM2-16GB", "MI250X", "cpu")
LAUNCH = Launch(command=["python", "train.py", "--text", "it's; $HOME"], image="registry/image:1", hours=1.5)


def cluster_of(*nodes: tuple[str, int]) -> Cluster:
    return Cluster(
        name="drawn",
        devices=tuple(
            Device(id=f"n{number}/{kind}:{place}", kind=kind, node=f"n{number}", memory_bytes=2**34, backend="cuda")
            for number, (kind, count) in enumerate(nodes)
            for place in range(count)
        ),
    )


CLUSTER = cluster_of(
    ("A100-SXM4-80GB", 4), ("A100-SXM4-80GB", 4), ("V100-SXM2-16GB", 8), ("cpu", 2), ("A100-SXM4-80GB", 4)
)
STARTED = [
    f"--nnodes=5 --node-rank={rank} --nproc-per-node={count} --master-addr=HEAD --master-port=29500 train.py --text it's; $HOME"
    for rank, count in enumerate((4, 4, 8, 2, 4))
]


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which torchrun writes down how it was called."""
    program(tmp_path, "torchrun", 'echo "$@" >> started')
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def started(folder: Path) -> list[str]:
    return sorted((folder / "started").read_text().splitlines(), key=lambda line: line.partition("node-rank")[2])


def test_a_batch_script_starts_each_node_once(tmp_path: Path, shell: dict[str, str]) -> None:
    nodes = " ".join(str(group.nodes) for group in groups_of(CLUSTER))
    program(tmp_path, "scontrol", '[ "$3" = "gpu[1-2]" ] && echo HEAD && echo second')
    program(
        tmp_path,
        "srun",
        f"nodes=({nodes}); group=${{1#--het-group=}}; shift 3\n"
        'for ((SLURM_NODEID = 0; SLURM_NODEID < nodes[group]; SLURM_NODEID++)); do export SLURM_NODEID; "$@"; done',
    )
    script = SCHEDULERS["slurm"](CLUSTER, LAUNCH)
    (tmp_path / "job.sh").write_text(script)
    variables = {**shell, "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[1-2]"}
    subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=variables, check=True, timeout=60)
    assert started(tmp_path) == STARTED
    assert script.count("#SBATCH hetjob") == 3
    for line in (
        "--nodes=2",
        "--gpus-per-node=a100:4",
        "--gpus-per-node=v100:8",
        "--cpus-per-task=2",
        "--time=1:30:00",
    ):
        assert f"#SBATCH {line}" in script


def test_a_group_that_fails_ends_the_others(tmp_path: Path, shell: dict[str, str]) -> None:
    program(tmp_path, "scontrol", "echo HEAD")
    program(tmp_path, "srun", '[ "$1" = --het-group=1 ] && exit 7; exec sleep 50')
    (tmp_path / "job.sh").write_text(SCHEDULERS["slurm"](CLUSTER, LAUNCH))
    assert subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=shell, check=False, timeout=30).returncode == 7


@pytest.mark.parametrize("scheduler", ["jobset", "trainjob"])
def test_pods_start_each_node_once(tmp_path: Path, shell: dict[str, str], scheduler: str) -> None:
    documents = list(yaml.safe_load_all(SCHEDULERS[scheduler](CLUSTER, LAUNCH)))
    spec: Any = documents[0]["spec"]
    spec = spec if scheduler == "jobset" else spec["template"]["spec"]
    for job in spec["replicatedJobs"]:
        assert job["replicas"] == 1
        of_job = job["template"]["spec"]
        assert of_job["parallelism"] == of_job["completions"]
        (container,) = of_job["template"]["spec"]["containers"]
        for index in range(of_job["completions"]):
            variables = {**shell, "JOB_COMPLETION_INDEX": str(index)}
            subprocess.run(container["command"], cwd=tmp_path, env=variables, check=True, timeout=60)
    head = f"heterodyne-{spec['replicatedJobs'][0]['name']}-0-0.heterodyne"
    assert started(tmp_path) == [line.replace("HEAD", head) for line in STARTED]
    of_gpus = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert of_gpus["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert of_gpus["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    if scheduler == "trainjob":
        assert documents[1]["spec"]["runtimeRef"]["name"] == documents[0]["metadata"]["name"]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 8)), min_size=1, max_size=8))
@settings(max_examples=30)
def test_nodes_of_ray_have_what_the_bundles_of_their_hosts_need(nodes: list[tuple[str, int]]) -> None:
    made = yaml.safe_load(SCHEDULERS["raycluster"](cluster_of(*nodes), replace(LAUNCH, hours=None)))
    groups = groups_of(cluster_of(*nodes))
    assert [(of["groupName"], of["replicas"]) for of in made["spec"]["workerGroupSpecs"]] == [
        (group.name, group.nodes) for group in groups
    ]
    for group, of in zip(groups, made["spec"]["workerGroupSpecs"], strict=True):
        started = of["rayStartParams"]
        offered = json.loads(started.get("resources", "'{}'").strip("'"))
        offered |= {
            name: int(started[f"num-{name.lower()}s"]) for name in ("CPU", "GPU") if f"num-{name.lower()}s" in started
        }
        assert offered == bundle_of(group)
        (container,) = of["template"]["spec"]["containers"]
        assert sum(container.get("resources", {"limits": {}})["limits"].values()) == offered.get("GPU", 0)


@pytest.mark.tour("submit/")
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 8)), min_size=1, max_size=8))
@settings(max_examples=60)
def test_groups_are_the_nodes_in_their_order(nodes: list[tuple[str, int]]) -> None:
    groups = groups_of(cluster_of(*nodes))
    assert [next(iter(g.devices.items())) for g in groups for _ in range(g.nodes)] == nodes
    assert [g.first for g in groups] == [sum(each.nodes for each in groups[:place]) for place in range(len(groups))]
    assert len({g.name for g in groups}) == len(groups)
    assert all(before.devices != after.devices for before, after in itertools.pairwise(groups))


@pytest.mark.parametrize(
    ("cluster", "launch", "told"),
    [
        (CLUSTER, Launch(command=["x"]), "give --image"),
        (cluster_of(("TPU-v4", 4)), LAUNCH, "TPU-v4.*NVIDIA or AMD"),
        (cluster_of(("something", 4)), LAUNCH, "something.*NVIDIA or AMD"),
    ],
)
def test_what_cannot_be_written_is_refused(cluster: Cluster, launch: Launch, told: str) -> None:
    with pytest.raises(ClusterError, match=told):
        SCHEDULERS["jobset"](cluster, launch)


@pytest.mark.parametrize("name", ["Upper", "1st", "end-", "a b", "x" * 50, ""])
def test_a_name_that_no_host_may_have_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="lower-case letters"):
        Launch(command=["x"], name=name)


@pytest.mark.parametrize(
    ("command", "run"),
    [
        (["python", "-m", "mine", "--x"], "-m mine --x"),
        (["/opt/bin/python3.11", "t.py"], "t.py"),
        (["python", "-u", "t.py"], "--no-python python -u t.py"),
        (["./t.sh", "a b"], "--no-python ./t.sh 'a b'"),
    ],
)
def test_a_program_is_run_as_it_was_written(command: list[str], run: str) -> None:
    assert f"--master-port=29500 {run}'" in SCHEDULERS["slurm"](
        cluster_of(("cpu", 1)), Launch(command=command)
    ).replace("'\\''", "'")


def test_the_first_host_has_a_name_that_others_reach(ssh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(ssh, "localhost b") == 2
    assert "name it with --master" in capfd.readouterr().err


def test_a_launcher_is_not_launched_once_more() -> None:
    for command in (["torchrun", "t.py"], ["/usr/bin/python3", "-m", "torch.distributed.run", "t.py"], ["srun", "x"]):
        with pytest.raises(HeterodyneError, match="starts workers itself"):
            Launch(command=command)
    Launch(command=["python", "-m", "mine"])


def test_the_verb_writes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(Path(__file__).parents[3] / "examples" / "clusters" / "two_generations.yaml")
    assert run(["submit", file, "--to", "slurm", "--", "python", "train.py", "--steps", "3"]) == 0
    assert "train.py --steps 3" in capsys.readouterr().out
    assert run(["submit", file, "--to", "pbs", "--", "python", "train.py"]) == 2
    assert "one of slurm, jobset, trainjob, raycluster" in capsys.readouterr().err


@pytest.fixture
def ssh(tmp_path: Path, shell: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hosts a, b and c, which ssh reaches, and gone, which it does not."""
    program(tmp_path, "ssh", 'shift 2; [ "$1" = gone ] && exit 255; export HOST=$1; shift; exec bash -c "$*"')
    monkeypatch.setenv("PATH", shell["PATH"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(folder: Path, hosts: str, *options: str) -> int:
    nodes = "\n".join(
        f"  - name: {host}\n    devices: [{{kind: cpu, count: 2, memory: 1GiB}}]" for host in hosts.split()
    )
    (folder / "cluster.yaml").write_text(f"name: hosts\nnodes:\n{nodes}\n")
    return run(
        ["launch", "cluster.yaml", "--directory", str(folder), "--logs", "logs", *options, "--", "python", "t.py"]
    )


def test_hosts_are_started_over_ssh_with_one_secret(ssh: Path) -> None:
    program(
        ssh,
        "torchrun",
        'echo "$HOST ${#HETERODYNE_RUN_SECRET} $SET $*" >> started; echo "$HETERODYNE_RUN_SECRET" >> secrets',
    )
    assert launch(ssh, "a b c", "--setup", "export SET=up", "--port", "4") == 0
    assert sorted((ssh / "started").read_text().splitlines()) == [
        f"{host} 64 up --nnodes=3 --node-rank={rank} --nproc-per-node=2 --master-addr=a --master-port=4 t.py"
        for rank, host in enumerate("abc")
    ]
    assert len(set((ssh / "secrets").read_text().splitlines())) == 1


def test_all_hosts_end_when_one_fails(ssh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program(
        ssh,
        "torchrun",
        'if [ $HOST = b ]; then sleep 1; echo broken; exit 3; fi\ntrap "echo $HOST >> ended; exit" TERM; sleep 60 & wait',
    )
    assert launch(ssh, "a b c") == 3
    told = capfd.readouterr().err
    assert "host b" in told
    assert "broken" in told
    assert sorted((ssh / "ended").read_text().split()) == ["a", "c"]


def test_a_host_that_cannot_be_reached_is_named(ssh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program(ssh, "torchrun", "sleep 60")
    assert launch(ssh, "a gone") == 255
    assert "try 'ssh gone true'" in capfd.readouterr().err


@pytest.mark.parametrize("hours", [0.0, 0.005, float("inf"), float("nan"), 1e300])
def test_hours_that_schedulers_would_take_for_something_else_are_refused(hours: float) -> None:
    with pytest.raises(ClusterError, match="from one minute"):
        replace(LAUNCH, hours=hours)


def test_a_ray_cluster_has_no_end_of_its_own() -> None:
    with pytest.raises(ClusterError, match="leave --hours out"):
        SCHEDULERS["raycluster"](CLUSTER, LAUNCH)
