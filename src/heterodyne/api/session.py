"""One rank among the others: who it is, how it reaches them, what the cluster is."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from heterodyne.api.script_end import left_with_script
from heterodyne.arguments import checked_arguments
from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.collective import Collectives
from heterodyne.errors import ClusterError, HeterodyneError
from heterodyne.measure.discover import discover_cluster
from heterodyne.printable import printable
from heterodyne.processes.heap import give_back_memory, keep_freed_memory
from heterodyne.processes.parent import end_with_launcher
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.exact.determinism import exact_arithmetic
from heterodyne.runtime.liveness.device_queue import DeviceQueue
from heterodyne.runtime.liveness.watchdog import Watchdog
from heterodyne.runtime.rendezvous.distributed import blamed, init_distributed
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.units import counted, format_seconds

__all__ = ["LONGEST_PHASE_S", "Session", "open_session"]

T = TypeVar("T")
Exit = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], object]

LONGEST_PHASE_S = 1800.0  # capturing, measuring, or writing a checkpoint of the largest models


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a rank has while it is connected. Made by `open_session`.

    Args:
        cluster: the device of each rank, in order; the same on every rank.
        device: where this rank's tensors live.
        communicator: joins the ranks.
        agreement: lets them fail together.
        watchdog: None where there is one rank only.
        inside: the exits of contexts that end with the session at the latest, see `held_open`.
    """

    cluster: Cluster
    device: torch.device
    communicator: Communicator
    agreement: Agreement
    watchdog: Watchdog | None
    inside: list[Exit] = field(default_factory=list, repr=False)

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    def say(self, text: str) -> None:
        """A line for people, from rank 0."""
        if self.rank == 0:
            sys.stderr.write(f"{printable(text)}\n")
            sys.stderr.flush()

    @contextmanager
    def announced(self, words: str) -> Iterator[None]:
        """A `phase` that is announced on stderr: its beginning, and its seconds."""
        self.say(f"{words} ...")
        started_s = time.perf_counter()
        with self.phase(words):
            yield
            self.give_back()
        self.say(f"{words}: {format_seconds(time.perf_counter() - started_s)}")

    def give_back(self) -> None:
        """Give the memory that a phase has left behind back to the system, so that the next one has all the memory that a CPU worker may
        use.

        Modules that were built to be measured refer to themselves in circles, so they would stay until Python happens to look for such.
        """
        if self.device.type == "cpu":
            give_back_memory()

    def together(self, do: Callable[[], T]) -> T:
        """Every rank does it and keeps its own result; if it fails on one, the same HeterodyneError is raised on all."""
        kept: list[T] = []
        self.agreement.gather_or_raise(lambda: kept.append(do()))
        return kept[0]

    def with_files(self, do: Callable[[], T]) -> T:
        """As `together`, of what hosts need the same files and libraries for: if it fails on some of them, the error names these."""
        kept: list[T] = []
        host = socket.gethostname()

        def attempt() -> tuple[str, HeterodyneError | None]:
            try:
                kept.append(do())
            except HeterodyneError as error:
                error.__cause__ = None
                return host, error
            return host, None

        told = self.agreement.gather_or_raise(attempt)
        failed = [error for _, error in told if error is not None]
        if failed:
            raise _with_hosts(failed[0], told)
        return kept[0]

    @contextmanager
    def held_open(self, leave: Exit) -> Iterator[None]:
        """If the session ends inside of the block, `leave` is called before it, as the exit of a context."""
        self.inside.append(leave)
        try:
            yield
        finally:
            self.inside.remove(leave)

    def leave_inside(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is still held open, the last one first."""
        for leave in reversed([*self.inside]):
            leave(kind, error, trace)

    def phase(self, words: str, limit_s: float = LONGEST_PHASE_S) -> AbstractContextManager[Any]:
        """Around what takes long and is no step: the watchdog is informed, so that no rank is reported as hanging before ``limit_s``."""
        return nullcontext() if self.watchdog is None else self.watchdog.phase(words, limit_s=limit_s)

    @contextmanager
    def calling(self, words: str) -> Iterator[None]:
        """Mark a call that every rank makes, in the same order, so that the watchdog names a rank that makes another one or fails alone."""
        if self.watchdog is None:
            yield
            return
        with self.watchdog.calling(words), blamed(self.watchdog):
            yield


@checked_arguments
@contextmanager
def open_session(
    cluster_file: Path | str | None = None, *, deterministic: bool = True, tf32: bool = False
) -> Iterator[Session]:
    """Connect this process with the other ranks of its launcher, or alone if there is none, while the block runs.

    Args:
        cluster_file: what the devices are said to be; None: what each rank finds.
        deterministic, tf32: of the whole process until the end of the block, see `exact_arithmetic`.

    Raises:
        ClusterError: the file does not fit the workers that were started; or there is none, and workers of a machine with accelerators
            are left without one.
        WorkerError: a rank came twice or never, or a peer died or hangs.
    """
    environment = WorkerEnvironment.read()
    end_with_launcher()
    rank = 0 if environment is None else environment.rank
    with left_with_script(lambda error: _closed(stack, error), rank=rank), ExitStack() as stack:
        watchdog, key = None, b""
        if environment is not None and environment.world_size > 1:
            joined = stack.enter_context(init_distributed(environment, backend="gloo"))
            watchdog, key = joined.watchdog, joined.key
        local_rank = 0 if environment is None else environment.local_rank
        device = _own_device(local_rank)
        stack.enter_context(exact_arithmetic(device, deterministic=deterministic, tf32=tf32))
        if watchdog is not None and device.type != "cpu":
            watchdog.follow(DeviceQueue(device))
        if device.type == "cpu":
            keep_freed_memory()
        communicator = stack.enter_context(
            Communicator(
                rank=rank,
                world_size=1 if environment is None else environment.world_size,
                device=device,
                key=key,
            )
        )
        found = discover_cluster(
            communicator,
            local_rank,
            1 if environment is None else environment.local_world_size,
            socket.gethostname(),
            node_rank=0 if environment is None else environment.node_rank,
        )
        if cluster_file is None:
            cluster = _without_leftovers(found)
        else:
            cluster = _as_described(load_cluster(cluster_file), found, Path(cluster_file))
        communicator.links = Collectives(cluster=cluster).to_other_hosts()
        session = Session(
            cluster=cluster,
            device=device,
            communicator=communicator,
            agreement=Agreement.of_all(key=key),
            watchdog=watchdog,
        )
        stack.push(session.leave_inside)
        yield session


def _with_hosts(error: HeterodyneError, of_ranks: Sequence[tuple[str, HeterodyneError | None]]) -> HeterodyneError:
    """Return the first error, with the hosts of each where not all ranks have the same. ``of_ranks``: the host of each, and its error."""
    texts = list(dict.fromkeys(str(each) for _, each in of_ranks if each is not None))
    if len(texts) > 1 or any(each is None for _, each in of_ranks):
        hosts = [dict.fromkeys(host for host, each in of_ranks if each and str(each) == text) for text in texts]
        good = ", ".join(dict.fromkeys(host for host, each in of_ranks if each is None))
        remedy = f"let every host have the same files{f', as {good} has them' if good else ''}"
        lines = [f"on {', '.join(names)}: {text}" for names, text in zip(hosts, texts, strict=True)]
        error.args = ("\n  ".join([*lines, remedy]),)
    error.shared = True
    return error


def _closed(stack: ExitStack, error: BaseException | None) -> None:
    stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _own_device(local_rank: int) -> torch.device:
    """Local rank k drives accelerator k while there are any, and is a CPU worker after that."""
    if torch.accelerator.is_available() and local_rank < torch.accelerator.device_count():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        torch.accelerator.set_device_index(local_rank)
        return torch.device(kind.type, local_rank)
    return torch.device("cpu")


def _without_leftovers(found: Cluster) -> Cluster:
    """The cluster, if no worker of a machine with accelerators is left to its CPU; who wants that says so in a file."""
    for node in dict.fromkeys(device.node for device in found.devices):
        of_node = {rank: device for rank, device in enumerate(found.devices) if device.node == node}
        left = [str(rank) for rank, device in of_node.items() if device.backend == "cpu"]
        if left and len(left) < len(of_node):
            raise ClusterError(
                f"{node} has {counted(len(of_node), 'worker')} and {counted(len(of_node) - len(left), 'accelerator')} that they see, so "
                f"{'rank' if len(left) == 1 else 'ranks'} {', '.join(left)} would train on the CPU: start one worker an accelerator, and "
                "let each see all of them (CUDA_VISIBLE_DEVICES equal for all; Slurm: --gpus-per-node, not --gpus-per-task). If CPUs shall "
                "train too, name them in a cluster file"
            )
    return found


def _counts(cluster: Cluster) -> list[tuple[str, int]]:
    """Return the nodes in the order of their ranks, with how many devices each has."""
    return [(node, len(list(of))) for node, of in groupby(device.node for device in cluster.devices)]


def _in_words(counts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{node}: {count}" for node, count in counts)


def _as_described(described: Cluster, found: Cluster, path: Path) -> Cluster:
    """The cluster of the file, if the workers that were started are its devices, in its order."""
    said, here = _counts(described), _counts(found)
    # On one machine, workers may stand for those of several.
    if len(described.devices) != len(found.devices) or (len(here) > 1 and [n for _, n in said] != [n for _, n in here]):
        raise ClusterError(
            f"it has {counted(len(described.devices), 'device')} ({_in_words(said)}), and {counted(len(found.devices), 'worker')} were "
            f"started ({_in_words(here)}): start one a device ('heterodyne train' does so on one machine; on several, 'heterodyne launch', "
            "or torchrun with that many processes a node)",
            path=str(path),
        )
    wrong = [
        f"rank {rank} runs on a {here.kind} ({here.backend}), the file says {there.kind} ({there.id})"
        for rank, (there, here) in enumerate(zip(described.devices, found.devices, strict=True))
        # Processors are not told apart here, so what the file calls them is their kind.
        if there.backend != here.backend or (there.kind != here.kind and here.backend != "cpu")
    ]
    if wrong:
        raise ClusterError(
            "\n  ".join(
                [
                    "the workers are not its devices:",
                    *wrong,
                    "to plan for devices that are not here: heterodyne plan JOB --on-paper",
                ]
            ),
            path=str(path),
        )
    # What the file does not say of its hosts, their workers have seen.
    seen = {there.node: found.hosts[here.node] for there, here in zip(described.devices, found.devices, strict=True)}
    return replace(described, hosts={**seen, **described.hosts})
