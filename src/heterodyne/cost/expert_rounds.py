"""Rounds of a mixture of experts whose tokens are sharded, if routing is even: all sets of k different experts are as likely.

Directly, a token has a row for each of its k choices. Hierarchically (`heterodyne.plan.relays`) it goes once to each host that has any of
them. Of E experts, of which e are on a host, that is one with the probability

    1 - C(E - e, k) / C(E, k)

and from its relay the rows of the choices of that host go on inside, k e / E of them on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

from heterodyne.cost.exchange import Round, rounds, to_everyone
from heterodyne.plan.relays import relays

__all__ = ["MixtureRows", "direct", "hierarchical", "reached"]

_COUNT_BYTES: Final = 8
_NUMBER_BYTES: Final = 4
"""Of an expert, beside a token."""


@dataclass(frozen=True, kw_only=True)
class MixtureRows:
    """What members send each other of a mixture.

    Args:
        tokens, experts: how many each member has.
        choices: of a token.
        row_bytes: of a token. ``weight_bytes``: of the weight of a choice.
    """

    tokens: Sequence[int]
    experts: Sequence[int]
    choices: int
    row_bytes: float
    weight_bytes: float


def reached(experts: int, own: int, choices: int) -> float:
    """Return the probability that some of a token's choices are among ``own`` of the experts."""
    return 1 - comb(experts - own, choices) / comb(experts, choices)


def direct(mixture: MixtureRows) -> tuple[tuple[Round, ...], tuple[Round, ...]]:
    """Return the rounds of the forward and of the backward: counts, rows of choices, and back."""
    members = len(mixture.tokens)
    size = mixture.row_bytes * mixture.choices * sum(mixture.tokens)
    (there,) = rounds("all_to_all", size, members, source=mixture.tokens, target=mixture.experts)
    return (to_everyone(_COUNT_BYTES * sum(mixture.experts), members), there, _back(there)), (there, _back(there))


def hierarchical(mixture: MixtureRows, hosts: Sequence[int]) -> tuple[tuple[Round, ...], tuple[Round, ...]]:
    """Return the same for tokens that go once to each host. ``hosts``: the number of each member's host, from 0 on."""
    members, experts = range(len(hosts)), sum(mixture.experts)
    of_hosts = [sum(mixture.experts[n] for n in members if hosts[n] == host) for host in range(max(hosts) + 1)]
    part = [reached(experts, own, mixture.choices) for own in of_hosts]
    tokens = [[0.0] * len(hosts) for _ in members]
    rows = [[0.0] * len(hosts) for _ in members]
    counts = [[0.0] * len(hosts) for _ in members]
    for source, own in enumerate(relays(hosts)):
        for host, relay in enumerate(own):
            tokens[source][relay] += mixture.tokens[source] * part[host]
            for target in (n for n in members if hosts[n] == host):
                rows[relay][target] += mixture.tokens[source] * mixture.choices * mixture.experts[target] / experts
                counts[relay][target] = _COUNT_BYTES * len(hosts) * mixture.experts[target]
    weights = mixture.choices * mixture.weight_bytes
    there = _times(tokens, mixture.row_bytes + weights + mixture.choices * _NUMBER_BYTES)
    inside, home = _times(rows, mixture.row_bytes), _times(tokens, mixture.row_bytes)
    return (
        (to_everyone(_COUNT_BYTES, len(hosts)), there, _times(counts, 1.0), inside, _back(inside), _back(home)),
        (home, inside, _back(inside), _back(_times(tokens, mixture.row_bytes + weights))),
    )


def _times(amounts: Sequence[Sequence[float]], size_bytes: float) -> Round:
    return tuple(tuple(amount * size_bytes for amount in row) for row in amounts)


def _back(there: Round) -> Round:
    return tuple(zip(*there, strict=True))
