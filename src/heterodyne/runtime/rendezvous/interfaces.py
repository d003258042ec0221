"""The interfaces by which ranks reach each other, and whether they do, asked before libraries connect that would wait without an end."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby

import psutil
import torch

from heterodyne.errors import WorkerError
from heterodyne.runtime.liveness.members import Member
from heterodyne.runtime.liveness.signing import SignedStore

__all__ = ["GLOO", "NCCL", "absent_interfaces", "listening", "require_interfaces", "require_reachable"]

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_CONNECTED_S = 5.0
_AT_ONCE = 32
_MOST_NAMED = 4
_POLL_S = 0.05


def absent_interfaces(variables: Mapping[str, str], there: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield what the variables of gloo and NCCL name that is not among the interfaces of this host, and what to write instead."""
    known = ", ".join(name for name in there if name != "lo")
    of_gloo = variables.get(GLOO, "").split(",")
    if missing := [name for name in of_gloo if name and name not in there]:
        yield (
            f"{GLOO}={variables[GLOO]}, and there is no interface {missing[0]}",
            f"it takes the names of interfaces: {known}",
        )
    of_nccl = variables.get(NCCL, "")
    names = of_nccl.removeprefix("=").split(",")
    if of_nccl and not of_nccl.startswith("^") and not any(each.startswith(name) for name in names for each in there):
        yield f"{NCCL}={of_nccl}, and no interface begins so", f"it takes beginnings of names: {known}"


def require_interfaces(own: Member) -> None:
    """Raise WorkerError if a variable names an interface that this host does not have."""
    used = (GLOO, NCCL) if torch.cuda.is_available() else (GLOO,)
    variables = {name: os.environ[name] for name in used if name in os.environ}
    if faults := list(absent_interfaces(variables, list(psutil.net_if_addrs()))):
        told = "; ".join(f"{what}: {remedy}" for what, remedy in faults)
        raise WorkerError(f"{own}: {told}", rank=own.rank, host=own.host)


@contextmanager
def listening() -> Iterator[str]:
    """Listen, while the block runs, at the address that gloo listens at; yield it with its port."""
    address = _address_of_gloo()
    # Nobody has to accept: the system answers for as many as may wait.
    with socket.create_server((address, 0), family=_family(address), backlog=socket.SOMAXCONN) as server:
        yield f"{address} {server.getsockname()[1]}"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _address_of_gloo() -> str:
    """Return the address of the interface that is named to gloo, else the first own one that the name of the host means."""
    name = os.environ.get(GLOO, "").partition(",")[0]
    if name:
        found = [
            each.address
            for each in psutil.net_if_addrs().get(name, ())
            if each.family in (socket.AF_INET, socket.AF_INET6)
        ]
    else:
        try:
            found = [
                str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            ]
        except OSError:
            found = []
    return next((address for address in found if _is_own(address)), "127.0.0.1")


def _is_own(address: str) -> bool:
    try:
        with socket.socket(_family(address)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def require_reachable(store: SignedStore, members: Sequence[Member], own: Member) -> None:
    """Raise WorkerError, on every rank, if the first rank of a host does not reach that of another one where it listens.

    Collective. All ranks of a host use one network, so that one of them asks for all.
    """
    hosts = [next(of) for _, of in groupby(sorted(members, key=_place), key=_place)]
    if len(hosts) == 1:
        return
    if own in hosts:
        store.set(f"reach/{own.rank}", _unreached(own, [member for member in hosts if member != own]))
    keys = [f"reach/{member.rank}" for member in hosts]
    while None in (found := store.get_all(keys)):  # a rank that dies is found by the watchdog
        time.sleep(_POLL_S)
    faults = [(member, text) for member, text in zip(hosts, found, strict=True) if text]
    if faults:
        raise WorkerError(
            f"{'; '.join(text for _, text in faults if text)}: open all ports between these hosts in their firewalls, or name to each the "
            f"interface of the network that joins them ({GLOO}, {NCCL}); without these, its name must mean its address there on each host",
            rank=faults[0][0].rank,
            host=faults[0][0].host,
        )


def _unreached(own: Member, others: Sequence[Member]) -> str:
    """Return which of the others do not answer, in words; "" for none."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        faults = [
            f"{member} at {member.listens.replace(' ', ':')} ({error})"
            for member, error in zip(others, pool.map(_fault, others), strict=True)
            if error is not None
        ]
    more = f" and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
    return f"{own} does not reach {', '.join(faults[:_MOST_NAMED])}{more}" if faults else ""


def _place(member: Member) -> tuple[str, str, str]:
    return member.host, member.machine, member.listens.partition(" ")[0]


def _fault(member: Member) -> str | None:
    address, _, port = member.listens.partition(" ")
    try:
        with socket.create_connection((address, int(port)), timeout=_CONNECTED_S):
            return None
    except OSError as error:
        return error.strerror or str(error)
