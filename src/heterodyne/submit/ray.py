"""One job on a cluster of Ray: a bundle of resources for each host of the cluster file, and in each an actor that runs its processes.

Bundles are unlike where hosts are. A kind of device is a resource of Ray with its name, since Ray knows GPUs only by their number.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from heterodyne.cluster import Cluster
from heterodyne.errors import ClusterError, HeterodyneError
from heterodyne.processes import shell_status, to_standard_error
from heterodyne.processes.logs import temporary_logs
from heterodyne.processes.port import reserve_port
from heterodyne.submit.groups import Launch, bundle_of, groups_of, host_commands, nodes_of
from heterodyne.submit.remote import started

__all__ = ["launch_on_ray"]

_GRACE_S = 15.0  # in which processes end that are asked to
_PATIENCE_S = 300.0  # for resources that others hold, or that Ray is about to add
_LOST = 255  # as ssh says of a host that is gone
_TAIL_LINES = 20
_POLL_S = 1.0


class RayHost:
    """An actor that runs the processes of one host. It needs two threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def meeting_point(self) -> tuple[str, int]:
        """Return the address of this host as others reach it, and a port that is free."""
        from ray import util

        with reserve_port() as port:
            return str(util.get_node_ip_address()), port

    def run(self, command: str, secret: str) -> Iterator[bytes | int]:
        """Yield what a command of the shell writes, line by line, and then its exit status."""
        self._process = started(command, secret, output=subprocess.PIPE)
        assert self._process.stdout is not None
        # Ray sends into what it is yielded from, and a file takes nothing.
        yield from (line for line in self._process.stdout)
        yield self._process.wait()

    def end(self) -> None:
        """Ask the command to end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


@dataclass(kw_only=True)
class _Running:
    """What runs on a host. ``log``: where what it writes goes; None: to the terminal."""

    host: str
    actor: Any
    stream: Any
    log: IO[bytes] | None
    status: int | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))


def launch_on_ray(
    cluster: Cluster,
    launch: Launch,
    before: Sequence[str],
    *,
    logs: Path | None = None,
    patience_s: float = _PATIENCE_S,
) -> int:
    """Run a process for each device of a cluster file on the hosts of a cluster of Ray, and return the exit status of the whole.

    Ranks are in the order of the file. The first host has the terminal; what another writes goes to ``logs/HOST.log``. All end when one
    fails, or with Ctrl-C. Ray is the one that this process belongs to or that runs here, else it starts on this machine.

    Args:
        before: commands of the shell before the program.
        logs: None: a temporary directory.
        patience_s: how long to wait for the resources.

    Raises:
        HeterodyneError: Ray is not installed, or has no such resources.
    """
    try:
        import ray
    except ImportError as error:
        raise HeterodyneError(
            "Ray is not installed here: pip install 'heterodyne[ray]', on all of its nodes"
        ) from error

    groups, names, secret = groups_of(cluster), nodes_of(cluster), secrets.token_hex(32)
    bundles = {names[g.first + place]: bundle_of(g) for g in groups for place in range(g.nodes)}
    with ExitStack() as stack:
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="warning")
            stack.callback(ray.shutdown)
        actors = _actors(bundles, stack, patience_s)
        address, port = ray.get(actors[names[0]].meeting_point.remote())
        directory = stack.enter_context(temporary_logs()) if logs is None else logs
        directory.mkdir(parents=True, exist_ok=True)
        commands = dict(host_commands(groups, names, replace(launch, port=port), before, master=address))
        hosts = [
            _Running(
                host=name,
                actor=actors[name],
                stream=actors[name].run.options(num_returns="streaming").remote(command, secret),
                log=None if name == names[0] else stack.enter_context((directory / f"{name}.log").open("wb")),
            )
            for name, command in commands.items()
        ]
        try:
            return _followed(ray, hosts)
        except KeyboardInterrupt:
            _end(ray, hosts)
            return shell_status(-signal.SIGINT)


def _actors(bundles: Mapping[str, Mapping[str, float]], stack: ExitStack, patience_s: float) -> dict[str, Any]:
    """Return an actor for each host, in a bundle that is given back with the ``stack``. Raises ClusterError."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([dict(bundle) for bundle in bundles.values()], strategy="PACK")
    stack.callback(remove_placement_group, group)
    if not group.wait(patience_s):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        raise ClusterError(_lacking(bundles, nodes, patience_s))
    actor = ray.remote(max_concurrency=2)(RayHost)
    return {
        host: actor.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources={name: count for name, count in bundle.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number, (host, bundle) in enumerate(bundles.items())
    }


def _lacking(
    bundles: Mapping[str, Mapping[str, float]], nodes: Sequence[Mapping[str, float]], patience_s: float
) -> str:
    """Return what is lacking of the bundles on these nodes, in words."""

    def of(resources: Mapping[str, float]) -> str:
        # Names with a colon are those that Ray gives each node.
        known = {name: count for name, count in resources.items() if ":" not in name and "memory" not in name}
        return ", ".join(f"{count:g} {name}" for name, count in sorted(known.items())) or "nothing"

    nowhere = [
        host
        for host, bundle in bundles.items()
        if not any(all(node.get(name, 0) >= count for name, count in bundle.items()) for node in nodes)
    ]
    has = f"Ray has {len(nodes)} nodes: {'; '.join(map(of, nodes))}"
    if not nowhere:
        return f"the resources of the {len(bundles)} hosts were not free within {patience_s:.0f} s: end what else runs there. {has}"
    own = {name: count for name, count in bundles[nowhere[0]].items() if name not in ("CPU", "GPU")}
    start = f"ray start --resources='{json.dumps(own)}'"
    return (
        f"no node of Ray has what host {nowhere[0]} of the cluster file needs, {of(bundles[nowhere[0]])}: "
        f"{'name its devices where it is started, ' + start if own else 'start a larger one'}. {has}"
    )


def _followed(ray: Any, hosts: Sequence[_Running]) -> int:
    """Hand on what the hosts write until all have ended; end all when one fails. Returns the exit status."""
    while any(each.status is None for each in hosts):
        _hand_on(ray, hosts, _POLL_S)
        failed = next((each for each in hosts if each.status), None)
        if failed is not None:
            _end(ray, hosts)
            status = shell_status(failed.status or 0)
            happened = "was lost with the actor there" if failed.status == _LOST else f"ended with exit status {status}"
            shown = [] if failed.log is None else [f"    {line}" for line in failed.tail]
            to_standard_error("\n".join([f"heterodyne: host {failed.host} {happened}; the others were ended.", *shown]))
            return status
    return 0


def _hand_on(ray: Any, hosts: Sequence[_Running], seconds: float) -> None:
    """Take what there is from each host; wait for the first for so many seconds."""
    of = {each.stream: each for each in hosts if each.status is None}
    ready, _ = ray.wait(list(of), num_returns=1, timeout=seconds)
    for each in (of[stream] for stream in ready):
        try:
            told = ray.get(next(each.stream))
        except (StopIteration, ray.exceptions.RayError) as error:
            each.tail.extend(str(error).splitlines())
            told = _LOST
        if isinstance(told, int):
            each.status = told
        elif each.log is None:
            to_standard_error(told.decode(errors="replace").rstrip("\n"))
        else:
            each.log.write(told)
            each.tail.append(told.decode(errors="replace").rstrip("\n"))


def _end(ray: Any, hosts: Sequence[_Running]) -> None:
    """Ask all to end, and kill after a while what has not."""
    for each in hosts:
        with suppress(ray.exceptions.RayError):
            each.actor.end.remote()
    until = time.monotonic() + _GRACE_S
    while any(each.status is None for each in hosts) and time.monotonic() < until:
        _hand_on(ray, hosts, _POLL_S)
    for each in hosts:
        ray.kill(each.actor)
