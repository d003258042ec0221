"""The one place that reads from the environment who this worker is and where the workers meet.

The launcher that is nearest to the process decides. `torchrun` is, and whatever sets its variables: our launchers, the emulator, Ray,
Kubeflow. Then ``mpirun`` (Open MPI; MPICH and Intel MPI by Hydra), whose daemons Slurm may have started; then Slurm's ``srun``.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from heterodyne.errors import WorkerError
from heterodyne.secret_names import SECRET_VARIABLE

__all__ = ["SECRET_VARIABLE", "WorkerEnvironment", "given_secret"]

_SHORTEST_SECRET = 16
_HOW_TO_MEET = (
    "MASTER_ADDR is the host of rank 0 as the others reach it ('hostname -f' there prints it), MASTER_PORT a port that is free there, "
    "29500 say, and both are the same for all workers"
)


class _Launcher(NamedTuple):
    """The variables of a launcher. ``node_ranks``: any of them; ``job``: any that differs between jobs of a machine."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node_ranks: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


_TORCHRUN = _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("GROUP_RANK", "NODE_RANK"))
_OPEN_MPI = _Launcher(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_HYDRA = _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", job=("PMI_PORT",))
_SLURM = _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS", ("SLURM_NODEID",))
_PMI = _Launcher("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", job=("PALS_APID",))
_OTHERS = (_OPEN_MPI, _HYDRA, _SLURM, _PMI)
"""Those beside torchrun, the nearest to the process first."""


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """Who this worker is among all.

    Args:
        rank: global, 0 <= rank < world_size.
        local_rank: among the workers of this machine.
        node_rank: the number of this machine, or of the launcher's agent on it (torchrun's GROUP_RANK).
        master_address: host of rank 0 and of the store where the workers meet.
        master_port: its port.
        store_is_hosted: the launcher keeps the store already (torchrun does), so rank 0 must not open it.
        attempt: how often a launcher has restarted the job; keeps the keys of one attempt apart from the next.
        secret: what all workers of the run know and nobody else, from HETERODYNE_RUN_SECRET; empty: that of the user, see
            `secret_of_user`.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    node_rank: int = 0
    store_is_hosted: bool = False
    attempt: int = 0
    secret: str = field(default="", repr=False)

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> WorkerEnvironment | None:
        """Return what the launcher said, or None if none started this process as one of several, so that it may start workers itself.

        Args:
            variables: the environment; None: that of the process.

        Raises:
            WorkerError: the variables contradict each other, some are missing, or one is not a number.
        """
        given = os.environ if variables is None else variables
        by = _launcher_of(given)
        if by is None or (by is not _TORCHRUN and _number(given, by.world_size, low=1) == 1):
            return None
        world_size = _number(given, by.world_size, low=1)
        rank = _number(given, by.rank, low=0, below=(by.world_size, world_size))
        local_rank = _number(given, by.local_rank, low=0, below=(by.world_size, world_size), default=0)
        # Slurm lists the ranks of the node.
        local = (
            given
            if by is not _SLURM
            else {by.local_world_size: str(len(given.get(by.local_world_size, "").split(",")))}
        )
        local_world_size = _number(local, by.local_world_size, low=local_rank + 1, default=local_rank + 1)
        if local_world_size > world_size:
            raise WorkerError(f"{by.local_world_size}={local_world_size} must be at most {by.world_size}={world_size}")
        node_rank = next((name for name in by.node_ranks if name in given), "")
        address, port = _meeting_point(given, by, alone=local_world_size == world_size)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master_address=address,
            master_port=_number(given, "MASTER_PORT", low=1, below=("the number of ports", 65_536), default=port),
            node_rank=_number(given, node_rank, low=0, default=0),
            store_is_hosted=by is _TORCHRUN and given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(given, "TORCHELASTIC_RESTART_COUNT", low=0, default=0) if by is _TORCHRUN else 0,
            secret=given_secret(given),
        )


def _launcher_of(given: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher that started this process; None for none. Raises WorkerError for one that does not say enough."""
    if _TORCHRUN.rank in given or _TORCHRUN.world_size in given:
        needed = (_TORCHRUN.rank, _TORCHRUN.world_size, "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in given or (name == "MASTER_ADDR" and not given[name].strip())]
        if missing:
            present = ", ".join(f"{name}={given[name][:40]!r}" for name in needed if name not in missing)
            raise WorkerError(
                f"the environment has {present} but not {', '.join(missing)}; start the workers with torchrun or heterodyne, or set all "
                f"four: {_HOW_TO_MEET}"
            )
        return _TORCHRUN
    found = next((by for by in _OTHERS if {by.rank, by.world_size, by.local_rank} <= given.keys()), None)
    one_of = (by.rank for by in _OTHERS if by.rank in given and given.get(by.world_size, "1") != "1")
    unknown = next((name for name in (*one_of, "PMIX_RANK", "PMI_RANK") if name in given), None)
    if found is None and unknown is not None and given.get("PMI_SIZE") != "1":
        raise WorkerError(
            f"{unknown}={given[unknown][:40]!r} says that this is one of several processes, and no variable says of how many, or which of "
            f"its machine: start them with mpirun, srun or torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK, and with them MASTER_ADDR "
            f"and MASTER_PORT: {_HOW_TO_MEET}"
        )
    return found


def _meeting_point(given: Mapping[str, str], by: _Launcher, *, alone: bool) -> tuple[str, int]:
    """Return the host where workers meet, and the port unless MASTER_PORT says it, which follows from the job. Raises WorkerError.

    ``alone``: all workers are on this machine.
    """
    address = given.get("MASTER_ADDR")
    if by is _SLURM:
        step = _number(given, "SLURM_JOB_ID", low=0, default=0) + _number(given, "SLURM_STEP_ID", low=0, default=0)
        return address or _first_node(given), 20_000 + step % 10_000
    if address is None and not alone:
        raise WorkerError(
            f"mpirun started {given[by.world_size]} processes on several machines, and none knows where rank 0 is; pass its host and a "
            "free port to all: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (MPICH: -genv MASTER_ADDR HOST -genv MASTER_PORT 29500)"
        )
    job = next((given[name] for name in by.job if name in given), "")
    return address or "localhost", 20_000 + zlib.crc32(job.encode()) % 10_000


def given_secret(given: Mapping[str, str]) -> str:
    """Return the secret that these variables have; empty: none. Raises WorkerError, which does not show it."""
    if SECRET_VARIABLE not in given:
        return ""
    secret = given[SECRET_VARIABLE]
    if len(secret) < _SHORTEST_SECRET or not (secret.isascii() and secret.isprintable()):
        raise WorkerError(
            f"{SECRET_VARIABLE} has {len(secret)} characters; it needs at least {_SHORTEST_SECRET}, all of printable ASCII: for example "
            "what `openssl rand -hex 32` prints, the same for all workers"
        )
    return secret


def _first_node(given: Mapping[str, str]) -> str:
    """Return the host of task 0 of a step of Slurm. Raises WorkerError.

    The list of a step over several components of a heterogeneous job is sorted by name; the tasks are in the order of the components.
    """
    of_step = list(_nodes(given.get("SLURM_STEP_NODELIST", "localhost")))
    components = _number(given, "SLURM_HET_SIZE", low=1, default=1)
    lists = [given.get(f"SLURM_JOB_NODELIST_HET_GROUP_{number}", "") for number in range(components)]
    first = of_step[:1] if components == 1 else [node for of in lists for node in _nodes(of) if node in set(of_step)]
    if not first:
        raise WorkerError(
            f"SLURM_STEP_NODELIST={given.get('SLURM_STEP_NODELIST', '')[:200]!r}, and no SLURM_JOB_NODELIST_HET_GROUP_n of the "
            f"{components} components says which of these is first: start srun in a job of sbatch or salloc, or export MASTER_ADDR. "
            f"{_HOW_TO_MEET}"
        )
    return first[0]


def _nodes(listed: str) -> Iterator[str]:
    """Yield the nodes of Slurm's list of them, in its order: ``gpu[03-04,9],cpu1`` gives gpu03, gpu04, gpu9 and cpu1, and ``a[1-2]b[3-4]``
    a1b3, a1b4, a2b3 and a2b4.
    """
    for text in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", listed):
        parts = re.split(r"\[([^\]]*)\]", text)
        choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
        yield from map("".join, product(*choices))


def _numbers(listed: str) -> list[str]:
    """Return what a bracket of Slurm's lists stands for: ``03-04,9`` is 03, 04 and 9."""
    found = []
    for part in listed.split(","):
        low, _, high = part.partition("-")
        several = low.isdigit() and high.isdigit()
        found += [f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)] if several else [part]
    return found


def _number(
    given: Mapping[str, str], name: str, *, low: int, below: tuple[str, int] | None = None, default: int | None = None
) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII):
        raise WorkerError(f"{name}={(text or '')[:40]!r} is not a whole number")
    value = int(text)
    if value < low:
        raise WorkerError(f"{name}={value} must be at least {low}")
    if below is not None and value >= below[1]:
        raise WorkerError(
            f"{name}={value} must be less than {below[0]}={below[1]}", rank=value if name == "RANK" else None
        )
    return value
