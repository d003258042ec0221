"""The one place that reads from the environment who this worker is and where the workers meet.

The variables are those of `torchrun`; our launcher and the emulator set the same ones. Those of Slurm's ``srun``, and of ``mpirun`` (Open
MPI; MPICH and Intel MPI by Hydra), are read where there are none.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from heterodyne.errors import WorkerError
from heterodyne.secret_names import SECRET_VARIABLE

__all__ = ["SECRET_VARIABLE", "WorkerEnvironment"]

_SHORTEST_SECRET = 16
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Rank, number of ranks, and the same on one machine: of Open MPI, and of Hydra."""


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
        """Return what the launcher said, or None if no launcher started this process.

        Args:
            variables: the environment; None: that of the process.

        Raises:
            WorkerError: the variables contradict each other, some are missing, or one is not a number.
        """
        given = os.environ if variables is None else variables
        if "RANK" not in given and "WORLD_SIZE" not in given:
            return cls._of_slurm(given) or cls._of_mpi(given)
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in given]
        if missing:
            present = ", ".join(f"{name}={given[name][:40]!r}" for name in needed if name in given)
            raise WorkerError(
                f"the environment has {present} but not {', '.join(missing)}; start the workers with torchrun or "
                "heterodyne, or set all four"
            )
        world_size = _number(given, "WORLD_SIZE", low=1)
        rank = _number(given, "RANK", low=0, below=("WORLD_SIZE", world_size))
        local_rank = _number(given, "LOCAL_RANK", low=0, below=("WORLD_SIZE", world_size), default=0)
        local_world_size = _number(given, "LOCAL_WORLD_SIZE", low=local_rank + 1, default=local_rank + 1)
        if local_world_size > world_size:
            raise WorkerError(f"LOCAL_WORLD_SIZE={local_world_size} must be at most WORLD_SIZE={world_size}")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master_address=given["MASTER_ADDR"],
            master_port=_number(given, "MASTER_PORT", low=1, below=("the number of ports", 65_536)),
            node_rank=_number(given, "GROUP_RANK", low=0, default=0),
            store_is_hosted=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(given, "TORCHELASTIC_RESTART_COUNT", low=0, default=0),
            secret=_secret(given),
        )

    @classmethod
    def _of_slurm(cls, given: Mapping[str, str]) -> WorkerEnvironment | None:
        """One task of several that ``srun`` started; None for a single task, which may start workers itself.

        The first node of the step is where the workers meet, at a port that follows from the number of the step.
        """
        if "SLURM_STEP_ID" not in given or _number(given, "SLURM_STEP_NUM_TASKS", low=1, default=1) == 1:
            return None
        world_size = _number(given, "SLURM_STEP_NUM_TASKS", low=1)
        node_rank = _number(given, "SLURM_NODEID", low=0, default=0)
        local_rank = _number(given, "SLURM_LOCALID", low=0, default=0)
        step = _number(given, "SLURM_JOB_ID", low=0, default=0) + _number(given, "SLURM_STEP_ID", low=0)
        return cls(
            rank=_number(given, "SLURM_PROCID", low=0, below=("SLURM_STEP_NUM_TASKS", world_size)),
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=_tasks_of_node(given.get("SLURM_STEP_TASKS_PER_NODE", str(local_rank + 1)), node_rank),
            node_rank=node_rank,
            master_address=given.get("MASTER_ADDR") or _first_node(given.get("SLURM_STEP_NODELIST", "localhost")),
            master_port=_number(
                given, "MASTER_PORT", low=1, below=("the number of ports", 65_536), default=20_000 + step % 10_000
            ),
            secret=_secret(given),
        )

    @classmethod
    def _of_mpi(cls, given: Mapping[str, str]) -> WorkerEnvironment | None:
        """One process of several that ``mpirun`` started; None for a single one.

        MPI does not say where rank 0 is: on several machines MASTER_ADDR does. The port of one machine follows from the name of the job.
        """
        known = next((names for names in _MPI if names[0] in given and names[1] in given), None)
        if known is None or _number(given, known[1], low=1) == 1:
            return None
        rank_name, size_name, local_rank_name, local_size_name = known
        world_size = _number(given, size_name, low=1)
        local_rank = _number(given, local_rank_name, low=0, default=0)
        local_size = _number(given, local_size_name, low=local_rank + 1, default=local_rank + 1)
        if "MASTER_ADDR" not in given and local_size != world_size:
            raise WorkerError(
                f"mpirun started {world_size} processes on several machines, and none knows where rank 0 is; pass its host and a free port "
                "to all: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (MPICH: -genv MASTER_ADDR HOST -genv MASTER_PORT 29500)"
            )
        job = given.get("PMIX_NAMESPACE") or given.get("OMPI_MCA_ess_base_jobid") or given.get("PMI_PORT", "")
        return cls(
            rank=_number(given, rank_name, low=0, below=(size_name, world_size)),
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_size,
            master_address=given.get("MASTER_ADDR", "localhost"),
            master_port=_number(
                given,
                "MASTER_PORT",
                low=1,
                below=("the number of ports", 65_536),
                default=20_000 + zlib.crc32(job.encode()) % 10_000,
            ),
            secret=_secret(given),
        )


def _secret(given: Mapping[str, str]) -> str:
    """Raises WorkerError, which does not show it."""
    if SECRET_VARIABLE not in given:
        return ""
    secret = given[SECRET_VARIABLE]
    if len(secret) < _SHORTEST_SECRET or not (secret.isascii() and secret.isprintable()):
        raise WorkerError(
            f"{SECRET_VARIABLE} has {len(secret)} characters; it needs at least {_SHORTEST_SECRET}, all of printable ASCII: for example "
            "what `openssl rand -hex 32` prints, the same for all workers"
        )
    return secret


def _first_node(nodes: str) -> str:
    """Return the first of Slurm's list of nodes: ``gpu[03-07,9],cpu1`` gives ``gpu03``."""
    name, bracket, inside = nodes.partition("[")
    if not bracket or "," in name:
        return nodes.partition(",")[0]
    return name + re.split(r"[-,\]]", inside)[0]


def _tasks_of_node(counts: str, node_rank: int) -> int:
    """Return the tasks of a node in Slurm's list of those of each: ``2(x3),1`` has 2 for the first three and 1 for the next. Raises
    WorkerError.
    """
    nodes = 0
    for part in counts.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None:
            raise WorkerError(f"SLURM_STEP_TASKS_PER_NODE={counts[:200]!r} is not a list such as 2(x3),1")
        nodes += int(match[2] or 1)
        if node_rank < nodes:
            return int(match[1])
    raise WorkerError(f"SLURM_STEP_TASKS_PER_NODE={counts[:200]!r} has {nodes} nodes, and SLURM_NODEID is {node_rank}")


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
