"""What the launcher says is taken as it is, and what cannot be true is refused with its name."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
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
        (
            {"MASTER_ADDR": "", "MASTER_PORT": None},
            r"but not MASTER_ADDR, MASTER_PORT; .* all four: MASTER_ADDR is the host of",
        ),
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


NODES = {"gpu03": 4, "amd1": 2, "cpu7": 1}
"""Ranks are in this order. Slurm sorts the hosts of a step over several components by name: amd1, cpu7, gpu03."""
PLACES = [
    (node_rank, local_rank, count, host)
    for node_rank, (host, count) in enumerate(NODES.items())
    for local_rank in range(count)
]
WORLD = len(PLACES)
MEETING = {"MASTER_ADDR": "gpu03", "MASTER_PORT": "29500"}


def of_torchrun(rank: int, node: int, local: int, count: int, host: str) -> dict[str, str]:
    return MEETING | {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(NODES)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def of_slurm(rank: int, node: int, local: int, count: int, host: str) -> dict[str, str]:
    """One component: its nodes have as many tasks as they like (``--ntasks-per-node`` apart, ``-m arbitrary``)."""
    first = rank - local
    return {
        "SLURM_JOB_ID": "90210",
        "SLURM_JOB_NODELIST": "gpu03,amd1,cpu7",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NODELIST": "gpu03,amd1,cpu7",
        "SLURM_STEP_NUM_TASKS": str(WORLD),
        "SLURM_STEP_TASKS_PER_NODE": "4,2,1",
        "SLURM_NTASKS": str(WORLD),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_GTIDS": ",".join(str(first + place) for place in range(count)),
        "SLURMD_NODENAME": host,
    }


def of_slurm_components(rank: int, node: int, local: int, count: int, host: str) -> dict[str, str]:
    """``srun --het-group=0-2``: lists and counts of the step are sorted by host, numbers of tasks and nodes go over all components."""
    groups = {f"SLURM_JOB_NODELIST_HET_GROUP_{number}": name for number, name in enumerate(NODES)}
    counts = {f"SLURM_NTASKS_HET_GROUP_{number}": str(tasks) for number, tasks in enumerate(NODES.values())}
    return (
        of_slurm(rank, node, local, count, host)
        | groups
        | counts
        | {
            "SLURM_HET_SIZE": "3",
            "SLURM_JOB_ID_HET_GROUP_0": "90210",
            "SLURM_JOB_ID_HET_GROUP_1": "90211",
            "SLURM_JOB_NODELIST": "amd1,cpu7,gpu03",
            "SLURM_STEP_NODELIST": "amd1,cpu7,gpu03",
            "SLURM_STEP_TASKS_PER_NODE": "2,1,4",
        }
    )


def of_open_mpi(rank: int, node: int, local: int, count: int, host: str) -> dict[str, str]:
    """``mpirun`` within an allocation of Slurm, whose ``srun`` started its daemons, one a host."""
    daemon = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(node), "SLURM_LOCALID": "0", "SLURM_NODEID": str(node)}
    ours = {"RANK": rank, "SIZE": WORLD, "LOCAL_RANK": local, "LOCAL_SIZE": count, "NODE_RANK": local}
    return (
        of_slurm(rank, node, local, count, host)
        | daemon
        | MEETING
        | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in ours.items()}
        | {"PMIX_NAMESPACE": "prterun-gpu03-41@1", "PMIX_RANK": str(rank), "PMIX_HOSTNAME": host}
    )


def of_intel_mpi(rank: int, node: int, local: int, count: int, host: str) -> dict[str, str]:
    ours = {"PMI_RANK": rank, "PMI_SIZE": WORLD, "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": count}
    return MEETING | {name: str(value) for name, value in ours.items()} | {"PMI_PORT": "gpu03:33415", "PMI_ID": "0"}


def of_pmi(rank: int, node: int, local: int, count: int, host: str) -> dict[str, str]:
    ours = {"PMI_RANK": rank, "PMI_SIZE": WORLD, "PMI_LOCAL_RANK": local, "PMI_LOCAL_SIZE": count}
    return MEETING | {name: str(value) for name, value in ours.items()}


def of_ray(rank: int, node: int, local: int, count: int, host: str) -> dict[str, str]:
    """What Ray Train sets in its workers."""
    ours = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count, "NODE_RANK": node}
    return MEETING | {name: str(value) for name, value in ours.items()} | {"RAY_JOB_ID": "01000000"}


@pytest.mark.parametrize(
    "of",
    [of_torchrun, of_slurm, of_slurm_components, of_open_mpi, of_intel_mpi, of_pmi, of_ray],
    ids=lambda of: of.__name__,
)
def test_every_launcher_says_the_same(of: Callable[..., dict[str, str]]) -> None:
    numbered = of not in (of_open_mpi, of_intel_mpi, of_pmi)  # whose hosts have no number
    for rank, (node, local, count, host) in enumerate(PLACES):
        found = WorkerEnvironment.read(of(rank, node, local, count, host))
        assert found == WorkerEnvironment(
            rank=rank,
            world_size=WORLD,
            local_rank=local,
            local_world_size=count,
            node_rank=node if numbered else 0,
            master_address="gpu03",
            master_port=20211 if "slurm" in of.__name__ else 29500,
        )


def test_processes_of_mpirun_on_one_machine_meet_there() -> None:
    alone = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")} | {
        "PMIX_NAMESPACE": "prterun-host-41@1"
    }
    ranks = [
        WorkerEnvironment.read(alone | {f"OMPI_COMM_WORLD_{name}": rank for name in ("RANK", "LOCAL_RANK")})
        for rank in "01"
    ]
    assert [found and (found.rank, found.local_rank, found.master_address) for found in ranks] == [
        (0, 0, "localhost"),
        (1, 1, "localhost"),
    ]
    assert len({found and found.master_port for found in ranks}) == 1
    away = {name: value for name, value in of_open_mpi(0, *PLACES[0]).items() if name not in MEETING}
    with pytest.raises(WorkerError, match=r"none knows where rank 0 is; .* mpirun -x MASTER_ADDR=HOST"):
        WorkerEnvironment.read(away)
    assert WorkerEnvironment.read(of_intel_mpi(0, 0, 0, 1, "x") | {"PMI_SIZE": "1"}) is None


def test_a_process_of_several_does_not_train_alone() -> None:
    with pytest.raises(WorkerError, match=r"PMIX_RANK='1' .* or set RANK, WORLD_SIZE and LOCAL_RANK"):
        WorkerEnvironment.read({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prun-1"})
    with pytest.raises(WorkerError, match="PMI_RANK='1' says that this is one of several"):
        WorkerEnvironment.read({"PMI_RANK": "1", "PMI_SIZE": "2"})
    with pytest.raises(WorkerError, match="OMPI_COMM_WORLD_RANK='1' says that this is one of several"):
        WorkerEnvironment.read({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1,b2", "a1"), ("n7", "n7"), ("n[1,4]", "n1"), ("x[001-128]", "x001"), ("r[1-2]n[3-4],c", "r1n3")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    found = WorkerEnvironment.read(of_slurm(0, *PLACES[0]) | {"SLURM_STEP_NODELIST": nodes})
    assert found is not None
    assert found.master_address == first


def test_some_components_of_a_job_meet_at_the_first_of_theirs() -> None:
    step = of_slurm_components(0, *PLACES[0]) | {
        "SLURM_STEP_NODELIST": "a[1-2],x[08-11]y",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "x[09-11]y,x08y",
        "SLURM_JOB_NODELIST_HET_GROUP_2": "a[1-2]",
    }
    found = WorkerEnvironment.read(step)
    assert found is not None
    assert found.master_address == "x09y"
    unknown = {name: value for name, value in step.items() if "GROUP" not in name}
    with pytest.raises(WorkerError, match="says which of these is first: start srun in a job of sbatch or salloc"):
        WorkerEnvironment.read(unknown)
    given = WorkerEnvironment.read(unknown | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert given is not None
    assert (given.master_address, given.master_port) == ("head", 1234)


def test_torchrun_within_a_step_of_slurm_counts_and_one_task_is_alone() -> None:
    step = of_slurm(6, *PLACES[6])
    within = WorkerEnvironment.read(step | GIVEN)
    assert within is not None
    assert within.rank == 1
    assert WorkerEnvironment.read(step | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert WorkerEnvironment.read({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None, "a batch script is no task"


def test_what_slurm_cannot_mean_is_refused() -> None:
    with pytest.raises(WorkerError, match="SLURM_PROCID=7 must be less than SLURM_STEP_NUM_TASKS=7"):
        WorkerEnvironment.read(of_slurm(0, *PLACES[0]) | {"SLURM_PROCID": "7"})
    with pytest.raises(WorkerError, match="SLURM_GTIDS=1 must be at least 2"):
        WorkerEnvironment.read(of_slurm(0, *PLACES[0]) | {"SLURM_LOCALID": "1", "SLURM_GTIDS": "0"})


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
            WorkerEnvironment.read(of_slurm(0, *PLACES[0]) | {"HETERODYNE_RUN_SECRET": secret})
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
