"""One job on unlike bundles of a cluster of Ray: exact, its logs kept, and ended as a whole when one host fails or is lost."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

CLUSTER = """
name: unlike
nodes:
  - name: one
    devices: [{kind: cpu, count: 1, memory: 1GiB}]
  - name: two
    devices: [{kind: cpu, count: 2, memory: 1GiB}]
  - name: odd
    devices: [{kind: laptop, count: 1, memory: 1GiB}]
"""

# Rank r has r + 1 samples.
TRAIN = """
import torch
import torch.distributed as dist
import heterodyne as hd

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
x, y = torch.randn(10, 4), torch.randn(10, 1)
dist.init_process_group("gloo")
rank = dist.get_rank()
print("rank", rank, "of", dist.get_world_size(), flush=True)
first = rank * (rank + 1) // 2
mine = slice(first, first + rank + 1)
parallel = hd.DistributedDataParallel(model)
torch.nn.functional.mse_loss(parallel(x[mine]), y[mine]).backward()
found = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
torch.nn.functional.mse_loss(model(x), y).backward()
for ours, p in zip(found, model.parameters(), strict=True):
    torch.testing.assert_close(ours, p.grad, rtol=1e-5, atol=1e-7)
print("exact", flush=True)
dist.barrier()
"""

DRIVER = """
import contextlib, io, json, os, sys, tempfile
from pathlib import Path
import ray
from heterodyne.cluster.file import load_cluster
from heterodyne.errors import HeterodyneError
from heterodyne.submit.groups import Launch
from heterodyne.submit.ray import launch_on_ray

folder, sockets, jobs = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
ray.init(
    num_cpus=3, resources={"laptop": 1}, include_dashboard=False, object_store_memory=80_000_000, _temp_dir=sockets,
    log_to_driver=False, logging_level="error",
)
told = {}
for name, (cluster, command, patience_s) in jobs.items():
    (folder / name).mkdir()
    (folder / name / "cluster.yaml").write_text(cluster)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            status = launch_on_ray(
                load_cluster(folder / name / "cluster.yaml"), Launch(command=command), [f"cd {folder}"],
                logs=folder / name, patience_s=patience_s,
            )
        except HeterodyneError as error:
            status = str(error)
    told[name] = (status, said.getvalue(), {log.stem: log.read_text() for log in (folder / name).glob("*.log")})
(folder / "told.json").write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each job ended with, said and left in its logs; by one instance of Ray, which takes seconds to start."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "train.py").write_text(TRAIN)
    python = Path(sys.executable)
    dies = "import os, time; os.environ['GROUP_RANK'] == '2' and (print('broken'), os._exit(3)); time.sleep(100)"
    # What stands for the host is its actor, the parent of the parent of torchrun, which is the parent of this.
    lost = (
        "import os, psutil, time; me = psutil.Process()\n"
        "actor = next(each for each in me.parents() if each.cmdline()[0].startswith('ray::'))\n"
        "os.environ['GROUP_RANK'] == '1' and os.environ['LOCAL_RANK'] == '0' and actor.kill()\n"
        "time.sleep(100)"
    )
    jobs = {
        "exact": (CLUSTER, ["python", "train.py"], 60),
        "dies": (CLUSTER, ["python", "-c", dies], 60),
        "lost": (CLUSTER, ["python", "-c", lost], 60),
        "lacking": (CLUSTER.replace("laptop", "H100-SXM-80GB"), ["true"], 1),
    }
    environment = os.environ | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="hd-ray-", dir="/tmp") as sockets:  # whose names must be short
        command = [sys.executable, "-c", DRIVER, str(folder), sockets, json.dumps(jobs)]
        done = subprocess.run(command, env=environment, timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command[:1])}: {done.stderr}"
    found: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return found


def test_unlike_bundles_train_as_one_device(told: dict[str, Any]) -> None:
    status, said, logs = told["exact"]
    assert status == 0, (said, logs)
    assert "rank 0 of 4" in said
    assert [said.count("exact"), logs["two"].count("exact"), logs["odd"].count("exact")] == [1, 2, 1]
    assert {line for line in logs["two"].splitlines() if "rank" in line} == {"rank 1 of 4", "rank 2 of 4"}
    assert "rank 3 of 4" in logs["odd"]


def test_all_bundles_end_when_one_fails_or_is_lost(told: dict[str, Any]) -> None:
    status, said, logs = told["dies"]
    assert status == 1  # that of torchrun
    assert "host odd ended with exit status 1; the others were ended" in said
    assert "broken" in logs["odd"]
    status, said, _ = told["lost"]
    assert status == 255
    assert "host two was lost with the actor there; the others were ended" in said


def test_resources_that_ray_does_not_have_are_named(told: dict[str, Any]) -> None:
    error = told["lacking"][0]
    assert "no node of Ray has what host odd of the cluster file needs, 1 GPU, 1 H100-SXM-80GB" in error
    assert """ray start --resources='{"H100-SXM-80GB": 1.0}'""" in error
    assert "Ray has 1 nodes: 3 CPU, 1 laptop" in error
