"""Hierarchical all-to-all among the members of a sharded stage: who receives for a host what comes from others.

A member sends what it has for any members of a host to one of them, its relay there, which hands it on inside of the host. So what
several members of the host need is sent once (Nie et al., "HetuMoE", 2022).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["hosts_of", "members_of", "relays"]


def hosts_of(nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the number of the host of each member from the names of their nodes, counted from 0 on as they first come."""
    number = {node: place for place, node in enumerate(dict.fromkeys(nodes))}
    return tuple(number[node] for node in nodes)


def members_of(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the members of each host, in their order. ``hosts``: the number of each member's host."""
    return tuple(
        tuple(member for member, own in enumerate(hosts) if own == host) for host in range(max(hosts, default=-1) + 1)
    )


def relays(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return for each member its relay in each host: on its own host itself, on others the one at the same relative place."""
    of_host = members_of(hosts)

    def relay(member: int, host: int) -> int:
        if hosts[member] == host:
            return member
        own, others = of_host[hosts[member]], of_host[host]
        return others[own.index(member) * len(others) // len(own)]

    return tuple(tuple(relay(member, host) for host in range(len(of_host))) for member in range(len(hosts)))
