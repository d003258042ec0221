"""What the launcher says is taken as it is, and what cannot be true is refused with its name."""

from __future__ import annotations

import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs do not declare it

from heterodyne.errors import WorkerError
from heterodyne.processes.port import reserve_port
from heterodyne.runtime.rendezvous import gateway
from heterodyne.runtime.rendezvous import store as stores
from heterodyne.runtime.rendezvous.distributed import init_distributed
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.rendezvous.file_handles import require_file_handles
from heterodyne.runtime.rendezvous.run_secret import secret_of_user
from heterodyne.runtime.rendezvous.store import open_store

GIVEN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SECRET = {"HETERODYNE_RUN_SECRET": "the secret of this run"}


@pytest.mark.tour("runtime/rendezvous/")
def test_torchrun_is_understood() -> None:
    by_torchrun = GIVEN | {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }
    assert WorkerEnvironment.read(by_torchrun) == WorkerEnvironment(
        rank=1,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        master_address="node0",
        master_port=29500,
        store_is_hosted=True,
        attempt=3,
    )


def test_ranks_of_mpirun_are_recognised() -> None:
    one_machine = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-host-41@1",
    }
    found, other = (
        WorkerEnvironment.read(one_machine | {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank})
        for rank in ("0", "1")
    )
    assert found is not None
    assert other is not None
    assert (found.rank, other.rank, other.local_rank, other.world_size) == (0, 1, 1, 2)
    assert found.master_address == "localhost"
    assert found.master_port == other.master_port
    assert WorkerEnvironment.read(one_machine | {"OMPI_COMM_WORLD_SIZE": "1"}) is None
    by_hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(WorkerError, match="none knows where rank 0 is"):
        WorkerEnvironment.read(by_hydra)
    found = WorkerEnvironment.read(by_hydra | {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    assert found is not None
    assert (found.rank, found.local_rank, found.local_world_size, found.master_address) == (3, 1, 2, "node0")


def test_the_four_necessary_variables_suffice() -> None:
    environment = WorkerEnvironment.read(GIVEN)
    assert environment is not None
    assert (environment.rank, environment.local_rank, environment.store_is_hosted) == (1, 0, False)


def test_without_a_launcher_there_is_no_environment() -> None:
    assert WorkerEnvironment.read({"MASTER_PORT": "29500", "HOME": "/"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, r"has RANK='1', MASTER_ADDR='node0', MASTER_PORT='29500' but not WORLD_SIZE; start"),
        ({"RANK": None}, r"but not RANK"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, r"but not MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "4"}, r"RANK=4 must be less than WORLD_SIZE=4"),
        ({"RANK": "-1"}, r"RANK=-1 must be at least 0"),
        ({"RANK": "one"}, r"RANK='one' is not a whole number"),
        ({"RANK": ""}, r"RANK='' is not a whole number"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE=0 must be at least 1"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, r"LOCAL_WORLD_SIZE=2 must be at least 3"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT=70000 must be less than the number of ports=65536"),
    ],
)
def test_contradictions_are_named(change: dict[str, str | None], message: str) -> None:
    given = {name: value for name, value in (GIVEN | change).items() if value is not None}
    with pytest.raises(WorkerError, match=message):
        WorkerEnvironment.read(given)


SLURM = {
    "SLURM_STEP_ID": "1",
    "SLURM_JOB_ID": "90210",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05],cpu1",
}


def test_tasks_of_slurm_are_ranks() -> None:
    assert WorkerEnvironment.read(SLURM) == WorkerEnvironment(
        rank=6, world_size=7, local_rank=0, local_world_size=1, node_rank=3, master_address="gpu03", master_port=20211
    )
    second = WorkerEnvironment.read(SLURM | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"})
    assert second is not None
    assert (second.local_rank, second.local_world_size) == (1, 2)
    given = WorkerEnvironment.read(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert given is not None
    assert (given.master_address, given.master_port) == ("head", 1234)


@pytest.mark.parametrize(("nodes", "first"), [("a1,b2", "a1"), ("n7", "n7"), ("n[1,4]", "n1"), ("x[001-128]", "x001")])
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    found = WorkerEnvironment.read(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert found is not None
    assert found.master_address == first


def test_torchrun_within_a_step_of_slurm_counts_and_one_task_is_alone() -> None:
    within = WorkerEnvironment.read(SLURM | GIVEN)
    assert within is not None
    assert within.rank == 1
    assert WorkerEnvironment.read(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert WorkerEnvironment.read({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None, "a batch script is no task"


def test_what_slurm_cannot_mean_is_refused() -> None:
    with pytest.raises(WorkerError, match="SLURM_PROCID=7 must be less than SLURM_STEP_NUM_TASKS=7"):
        WorkerEnvironment.read(SLURM | {"SLURM_PROCID": "7"})
    with pytest.raises(WorkerError, match="SLURM_STEP_TASKS_PER_NODE='two' is not a list"):
        WorkerEnvironment.read(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"})
    with pytest.raises(WorkerError, match=r"SLURM_STEP_TASKS_PER_NODE='2' has 1 nodes, and SLURM_NODEID is 1"):
        WorkerEnvironment.read(SLURM | {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"})


def test_each_meeting_of_the_same_processes_has_keys_of_its_own() -> None:
    """The store of torchrun outlives a trainer, and what the first has left there must not be read by the second."""
    launcher = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = GIVEN | SECRET | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher.port)}
    environment = WorkerEnvironment.read(given | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert environment is not None
    with open_store(environment, timeout_s=10.0) as first, open_store(environment, timeout_s=10.0) as second:
        first.store.set("address", "gone")
        assert first.store.check(["address"])
        assert not second.store.check(["address"])


def test_a_secret_is_not_shown_and_not_short() -> None:
    environment = WorkerEnvironment.read(GIVEN | {"HETERODYNE_RUN_SECRET": "0123456789abcdef"})
    assert environment is not None
    assert environment.secret == "0123456789abcdef"
    assert "0123456789abcdef" not in repr(environment)
    for secret in ("", "short", "sixteen letters\n", "é" * 16):
        with pytest.raises(
            WorkerError, match=f"HETERODYNE_RUN_SECRET has {len(secret)} characters; it needs at least 16"
        ) as told:
            WorkerEnvironment.read(SLURM | {"HETERODYNE_RUN_SECRET": secret})
        assert not secret or secret not in str(told.value)


def test_without_a_secret_the_workers_of_a_user_have_one_in_common(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        made = {found.result() for found in [pool.submit(secret_of_user) for _ in range(8)]}
    assert len(made) == 1
    assert len(made.pop()) == 64
    (file,) = (tmp_path / "heterodyne").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    with pytest.raises(WorkerError, match="is no file that only its owner can read: remove it, or set HETERODYNE_RUN"):
        secret_of_user()
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    with pytest.raises(WorkerError, match=r"cannot be made or read .*: set HETERODYNE_RUN_SECRET to one long random"):
        secret_of_user()


def test_a_process_group_that_is_there_is_told() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        environment = WorkerEnvironment.read(GIVEN)
        assert environment is not None
        with pytest.raises(WorkerError, match="close one trainer"), init_distributed(environment, backend="gloo"):
            pass
    finally:
        dist.destroy_process_group()


def test_a_program_that_is_no_store_and_a_name_that_nobody_knows_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own client would wait for minutes before a listener that says nothing."""
    monkeypatch.setattr(stores, "_ANSWER_S", 0.5)
    monkeypatch.setattr(stores, "_RESOLVED_S", 0.2)
    monkeypatch.setattr(gateway, "_HANDSHAKE_S", 0.2)
    given = GIVEN | SECRET | {"MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = WorkerEnvironment.read(given | {"MASTER_PORT": str(silent.getsockname()[1])})
        assert environment is not None
        with (
            pytest.raises(WorkerError, match=r"what listens there does not answer .* Set another MASTER_PORT"),
            open_store(environment, timeout_s=10.0),
        ):
            pass
        hosted = replace(environment, store_is_hosted=True)
        with pytest.raises(WorkerError, match="not answer as a store"), open_store(hosted, timeout_s=10.0):
            pass
    environment = WorkerEnvironment.read(given | {"MASTER_ADDR": "nobody.invalid"})
    assert environment is not None
    with (
        pytest.raises(WorkerError, match=r"MASTER_ADDR='nobody.invalid' does not resolve"),
        open_store(environment, timeout_s=10.0),
    ):
        pass


def test_who_waits_says_for_whom() -> None:
    said: list[str] = []
    with reserve_port() as port:
        environment = WorkerEnvironment.read(
            GIVEN | SECRET | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "LOCAL_RANK": "0"}
        )
        assert environment is not None
        with (
            pytest.raises(WorkerError, match="found nobody at MASTER_ADDR:MASTER_PORT"),
            open_store(environment, timeout_s=0.5, say=said.append, every_s=0.1),
        ):
            pass
    assert len(said) >= 2
    assert f"rank 1 waits for rank 0 at 127.0.0.1:{port}, where nobody listens yet" in said[0]


def test_too_few_open_files_are_told_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, set_to, said = {"of": (256, 256)}, [], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: allowed["of"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    require_file_handles(2, said.append)
    with pytest.raises(WorkerError, match="may have 256 files open here, and each of 64 workers needs about 604"):
        require_file_handles(64, said.append)
    assert (set_to, said) == ([], [])
    allowed["of"] = (256, resource.RLIM_INFINITY)  # its own limit it may raise
    require_file_handles(64, said.append)
    assert (set_to, said) == ([(3 * 604, resource.RLIM_INFINITY)], [])
    allowed["of"] = (256, 1024)
    require_file_handles(64, said.append)
    assert set_to[1:] == [(1024, 1024)]
    assert "may need 1812 under a plan that cuts the model" in said[0]
