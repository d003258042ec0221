"""The ways to spread a batch that are worth weighing: who takes part, and with which micro-batches.

Where ops mix the samples of a micro-batch (BatchNorm in training), the number of micro-batches is part of the mathematics: the
statistics are those of one micro-batch over all devices. Then all proposals share one number, the smallest with which any of
them fits the memory, since that is nearest to one device that sees the whole batch; what cannot keep it is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import InfeasibleError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.search.balance import balance
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Kind

__all__ = ["Proposal", "Proposer"]

_MOST_SUBSETS = 24


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """``micro_batches``: of each device with a share, in the order of ranks; empty if it cannot be, and ``why_not`` says why."""

    name: str
    kind: Kind
    micro_batches: Mapping[str, MicroBatches] = field(default_factory=dict)
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Proposer:
    """Makes proposals for the devices that can hold the model.

    Args:
        runs: how each of them runs samples, in the order of ranks.
        samples: the global batch.
        count: the number of micro-batches that everyone must have, None where it is free.
    """

    cluster: Cluster
    runs: Mapping[str, MicroBatchChoice]
    samples: int
    count: int | None = None
    _tables: dict[str, list[float]] = field(default_factory=dict)

    def micro_batches(self, device: str, samples: int) -> MicroBatches:
        """How the device runs that many samples. Raises InfeasibleError if it cannot, which happens only under a fixed count."""
        run = self.runs[device]
        if self.count is None or samples == 0:
            return run.micro_batches(samples)
        if not self.count <= samples <= self.count * run.largest:
            raise InfeasibleError(
                f"{device} would run {samples} samples in {self.count} micro-batches, "
                f"it can run {self.count} to {self.count * run.largest}"
            )
        return MicroBatches(tuple(sorted(MicroBatches.of_count(samples, self.count).sizes)))

    def balanced(self, name: str, kind: Kind, devices: Sequence[str]) -> Proposal:
        """The shares with the least time of the slowest."""
        least = None if self.count is None else [self.count] * len(devices)
        try:
            shares = balance([self._table(device) for device in devices], self.samples, least).shares
            return self.of_shares(name, kind, dict(zip(devices, shares, strict=True)))
        except InfeasibleError as error:
            return Proposal(name=name, kind=kind, why_not=str(error))

    def equal(self) -> Proposal:
        """The same share for each device; where it cannot be divided, the first ones take one sample more."""
        each, more = divmod(self.samples, len(self.runs))
        shares = {device: each + (number < more) for number, device in enumerate(self.runs)}
        try:
            return self.of_shares("equal shares", "equal", shares)
        except InfeasibleError as error:
            return Proposal(name="equal shares", kind="equal", why_not=str(error))

    def of_shares(self, name: str, kind: Kind, shares: Mapping[str, int]) -> Proposal:
        """The proposal with exactly those shares. Raises InfeasibleError if a device cannot run its share."""
        chosen = {device: self.micro_batches(device, share) for device, share in shares.items() if share}
        return Proposal(
            name=name, kind=kind, micro_batches={device: chosen[device] for device in self.runs if device in chosen}
        )

    def fastest(self) -> Proposal:
        """One device alone: the one that is done first."""
        options = [self.balanced(f"the fastest device alone, {device}", "fastest", [device]) for device in self.runs]
        possible = [option for option in options if option.micro_batches]
        if not possible:
            return Proposal(name="the fastest device alone", kind="fastest", why_not=options[0].why_not)
        return min(possible, key=self._alone_s)

    def _alone_s(self, proposal: Proposal) -> float:
        return sum(self.runs[d].compute_s(m) + self.runs[d].fixed_s for d, m in proposal.micro_batches.items())

    def fewer(self) -> list[Proposal]:
        """Subsets: without the slowest one, two, ...; and without each node, since it may be a link that is slow."""
        ranked = sorted(self.runs, key=lambda device: -self.runs[device].rate)  # stable: ties in the order of ranks
        subsets: dict[tuple[str, ...], str] = {}
        for kept in _counts(len(ranked)):
            slow = ranked[kept:]
            what = ", ".join(slow) if len(slow) <= 3 else f"the {len(slow)} slowest devices"
            subsets[tuple(device for device in self.runs if device in ranked[:kept])] = f"without {what}"
        nodes = {device: self.cluster.device(device).node for device in self.runs}
        for node in dict.fromkeys(nodes.values()):
            rest = tuple(device for device in self.runs if nodes[device] != node)
            if len(rest) > 1:
                subsets.setdefault(rest, f"without node {node}")
        return [self.balanced(name, "fewer", devices) for devices, name in subsets.items()]

    def all(self) -> list[Proposal]:
        """Everything worth weighing, the most promising first."""
        count = len(self.runs)
        fit = count == len(self.cluster.devices)
        if count == 1:
            return [self.balanced(f"the only device{'' if fit else ' that fits'}", "balanced", list(self.runs))]
        who = f"all {count} devices" if fit else f"the {count} devices that fit"
        everyone = self.balanced(f"balanced over {who}", "balanced", list(self.runs))
        if 0 < (used := len(everyone.micro_batches)) < count:
            everyone = replace(everyone, name=f"balanced over {used} of {who.removeprefix('all ')}")
        return [everyone, self.equal(), *self.fewer(), self.fastest()]

    def _table(self, device: str) -> list[float]:
        if device not in self._tables:
            run = self.runs[device]
            self._tables[device] = (
                run.table(self.samples) if self.count is None else run.table_of_count(self.count, self.samples)
            )
        return self._tables[device]


def _counts(devices: int) -> list[int]:
    """How many of the fastest devices to keep: every number from 2 up to one less than all, thinned out for large clusters."""
    every = list(range(devices - 1, 1, -1))
    if len(every) <= _MOST_SUBSETS:
        return every
    return sorted(
        {every[round(i * (len(every) - 1) / (_MOST_SUBSETS - 1))] for i in range(_MOST_SUBSETS)}, reverse=True
    )
