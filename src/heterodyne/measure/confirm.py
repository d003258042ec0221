"""Whether a kept profile still holds: one block and one collective are timed again.

A device whose power is capped or whose share is throttled keeps its name, so the key of a profile cannot tell.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from heterodyne.cluster.profile import WHOLE, BlockSample, Profile
from heterodyne.errors import MeasureError
from heterodyne.measure.block_run import BlockProgram, BlockRun
from heterodyne.measure.collectives import measure_all_reduce
from heterodyne.measure.notes import told_once, words_of
from heterodyne.measure.peers import Peers, ProcessGroup
from heterodyne.measure.sampling import Timing
from heterodyne.measure.workbench import Workbench
from heterodyne.units import format_bytes, format_seconds

__all__ = [
    "BLOCK_TOLERANCE",
    "LINK_TOLERANCE",
    "MOST_TOLERANCE",
    "Cores",
    "block_to_confirm",
    "busy",
    "changes",
    "taken_by_others",
]

BLOCK_TOLERANCE = 0.15
MOST_TOLERANCE = 0.25  # for a block whose samples themselves were that far apart, then or now
LINK_TOLERANCE = 1.0  # a collective on a busy host varies by tens of percent; what matters is another link
_TRIES = 2


def block_to_confirm(profile: Profile) -> tuple[str, int]:
    """The kind with the longest run at its smallest size, and that size: the same answer on every rank.

    Raises MeasureError for a profile without a measured block.
    """
    candidates: list[tuple[float, str, int]] = []
    for device in profile.devices.values():
        for kind, samples in device.blocks.items():
            if kind != WHOLE and samples and not samples[0].extrapolated:
                candidates.append((_seconds(samples[0]), kind, samples[0].micro_batch_size))
    if not candidates:
        raise MeasureError("the kept profile has no measured block; it will be measured again")
    _, kind, size = max(candidates)
    return kind, size


def changes(
    profile: Profile,
    programs: Mapping[str, BlockProgram],
    device_ids: Sequence[str],
    peers: Peers,
    process_group: ProcessGroup | None,
    bench: Workbench,
) -> list[str]:
    """Return what is no longer as the profile says, in sentences; empty if it holds. Every rank gets the same answer.

    What differs is timed a second time before it is believed: a busy moment of the machine is no other machine.
    """
    kind, size = block_to_confirm(profile)
    found: list[str] = []
    for _ in range(_TRIES):
        change = _block_change(profile, programs[kind], kind, size, device_ids[peers.rank], bench)
        mine = () if change is None else (change,)
        found = told_once(device_ids, peers.all_gather_object(mine))
        if not found:
            break
    if not found and process_group is not None:
        for _ in range(_TRIES):
            found = _link_change(profile, device_ids, peers, process_group, bench)
            if not found:
                break
    return found


def _block_change(
    profile: Profile, program: BlockProgram, kind: str, size: int, device: str, bench: Workbench
) -> str | None:
    before = next(s for s in profile.devices[device].blocks[kind] if s.micro_batch_size == size)
    run: BlockRun | None = None
    change: str | None = None
    bench.meet()
    try:
        run = bench.run_of(program, size)
        change = _difference(before, bench.time(run), bench.name_of(kind))
    except Exception as error:  # noqa: BLE001  # whatever it is: the others wait, and measuring anew will tell
        run, change = None, f"{bench.name_of(kind)} fails now ({words_of(error)})"
    bench.meet(run)
    return change


def _difference(before: BlockSample, timing: Timing, name: str) -> str | None:
    forward, _, backward = timing.laps
    now_s, then_s = forward + backward, _seconds(before)
    tolerance = min(MOST_TOLERANCE, max(BLOCK_TOLERANCE, before.spread, timing.spread))
    if abs(now_s - then_s) <= tolerance * then_s:
        return None
    return f"{name} takes {format_seconds(now_s)} and took {format_seconds(then_s)}"


def _link_change(
    profile: Profile, device_ids: Sequence[str], peers: Peers, process_group: ProcessGroup, bench: Workbench
) -> list[str]:
    known = [s for s in profile.links if s.op == "all_reduce" and set(s.devices) == set(device_ids)]
    if not known:
        return []
    then = known[len(known) // 2]
    fresh = measure_all_reduce(peers, process_group, device_ids, bench, message_bytes=[then.bytes])
    ratio = fresh[0].seconds / then.seconds if fresh else float("inf")
    if 1 / (1 + LINK_TOLERANCE) <= ratio <= 1 + LINK_TOLERANCE:
        return []
    return [f"all-reduce of {format_bytes(then.bytes)} takes {ratio:.2g} times what it took"]


def _seconds(sample: BlockSample) -> float:
    return sample.forward_s + sample.backward_s


_BUSY = 0.1
"""Of the cores. With more of them idle nobody waits for one, and with less of them taken by others a trial sees what they cost."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Seconds of all cores of a host, since some moment: ``worked_s`` by whomever, also by those on the other side of a hypervisor, and
    ``idle_s``; ``own_s``: of them by this process.
    """

    worked_s: float
    idle_s: float
    own_s: float

    @classmethod
    def now(cls) -> Cores:
        times = psutil.cpu_times()._asdict()
        idle_s = times["idle"] + times.get("iowait", 0.0)
        # The kernel counts guests twice.
        worked_s = sum(times.values()) - idle_s - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        return cls(worked_s=worked_s, idle_s=idle_s, own_s=time.process_time())

    def since(self, before: Cores) -> Cores:
        return Cores(
            worked_s=self.worked_s - before.worked_s,
            idle_s=self.idle_s - before.idle_s,
            own_s=self.own_s - before.own_s,
        )


def taken_by_others(nodes: Sequence[str], seen: Sequence[Cores]) -> dict[str, float]:
    """The part of each host's cores that none of our workers had, of hosts whose workers had to share them: 0 where cores were idle.

    Args:
        nodes: the host of each rank.
        seen: what each rank has seen in the same time.
    """
    found = {}
    for node in dict.fromkeys(nodes):
        of_node = [cores for own, cores in zip(nodes, seen, strict=True) if own == node]
        worked_s, idle_s = (sum(getattr(c, name) for c in of_node) / len(of_node) for name in ("worked_s", "idle_s"))
        all_s = worked_s + idle_s
        others_s = worked_s - sum(cores.own_s for cores in of_node)
        found[node] = max(0.0, others_s / all_s) if all_s > 0 and idle_s < _BUSY * all_s else 0.0
    return found


def busy(taken: Mapping[str, float]) -> list[str]:
    """A sentence for each host of which others take so much that a plan will be off."""
    return [
        f"{'this machine' if len(taken) == 1 else node} is busy ({part:.0%} of its cores are taken by others): the plan will be off"
        for node, part in taken.items()
        if part > _BUSY
    ]
