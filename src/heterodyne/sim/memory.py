"""Memory of one rank over its list of actions: what each allocates and frees, and the peak, also of what is kept on its host.

A forward allocates what its stage saves of the micro-batch; R what was not saved, RELOAD what was offloaded; a backward frees all, or
split: I leaves what W still needs. The first backward of a stage leaves its gradients. With sharded parameters UNSHARD allocates a
bucket and RESHARD frees it; with sharded gradients SCATTER leaves the own shard of a bucket. The workspace of an action counts while it
runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, Reduction
from heterodyne.plan.buckets import BUCKETS_UNDER_WAY
from heterodyne.plan.program import Action

__all__ = ["changes", "host_peak", "in_passes", "peak"]

Change = tuple[int, int]
_PASSES = frozenset({"F", "B", "I", "W", "R", "CLIP", "STEP"})


def peak(actions: Sequence[Action], costs: RankCosts | None) -> int:
    """The most bytes at any time; 0 for an idle rank."""
    if costs is None or not actions:
        return 0
    alive = costs.fixed_bytes - costs.coming_bytes
    most = alive
    for during, after in changes(actions, costs):
        if alive + during > most:
            most = alive + during
        alive += after
        if alive > most:
            most = alive
    return most


def host_peak(actions: Sequence[Action], costs: RankCosts | None) -> int:
    """The most bytes of activations that wait in the memory of the host: from the forward of a micro-batch to the end of its backward, or
    its first half."""
    if costs is None:
        return 0
    alive = most = 0
    for action in actions:
        own = costs.stages[action.stage].host_bytes if action.kind in ("F", "B", "I") else ()
        if own and action.index is not None:
            alive += own[action.index] if action.kind == "F" else -own[action.index]
            most = max(most, alive)
    return most


def changes(actions: Sequence[Action], costs: RankCosts) -> list[Change]:
    """For each action the bytes on top of those before it: the most while it runs, and what stays when it is over."""
    table = _table(actions, costs)
    arriving = _Arriving(actions, costs)
    shards = _Shards(actions, costs)
    made = []
    for action in actions:
        if action.kind in table:
            during, after = table[action.kind][action.stage][action.index]  # type: ignore[index]  # these have one
            made.append(shards.passed(action, arriving.added(action, during, after)))
        elif action.kind in ("CLIP", "STEP"):
            gone = arriving.summed + shards.settled()
            made.append((costs.update_bytes - gone, -gone))
            arriving.summed = 0
        else:
            made.append(shards.change(action))
    return made


def in_passes(actions: Sequence[Action], costs: RankCosts) -> dict[Action, Change]:
    """The same of passes, CLIP and STEP alone: what happens between two of them happens in the second."""
    made: dict[Action, Change] = {}
    most = now = 0
    for action, (during, after) in zip(actions, changes(actions, costs), strict=True):
        most, now = max(most, now + during), now + after
        if action.kind in _PASSES:
            made[action] = most, now
            most = now = 0
    return made


class _Arriving:
    """The gradients that the first backward of a stage leaves, and what its last one adds until the update."""

    def __init__(self, actions: Sequence[Action], costs: RankCosts) -> None:
        self._costs = costs
        backwards: dict[tuple[str, int], list[Action]] = {}
        for action in actions:
            stage = costs.stages.get(action.stage) if action.kind in ("B", "I", "W") else None
            if stage is not None and (stage.made_bytes or stage.summed_bytes) and _of(stage.kept_bytes, action):
                backwards.setdefault((action.kind, action.stage), []).append(action)
        self._first = {of[0] for of in backwards.values()}
        self._last = {of[-1] for (kind, _), of in backwards.items() if kind != "I"}
        self.summed = sum(costs.stages[action.stage].summed_bytes for action in self._last)

    def added(self, action: Action, during: int, after: int) -> Change:
        if action in self._first:
            during, after = self._of_first(action, during, after)
        if action in self._last:
            stage = self._costs.stages[action.stage]
            during, after = during + _of(stage.last_bytes, action), after + stage.summed_bytes
        return during, after

    def _of_first(self, action: Action, during: int, after: int) -> Change:
        stage, space = self._costs.stages[action.stage], self._costs.workspace_bytes
        if action.kind == "I":
            return during + stage.input_made_bytes, after + stage.input_made_bytes
        if action.kind == "W":
            made = stage.made_bytes - stage.input_made_bytes
            return max(during, space + made - _of(stage.weight_bytes, action)), after + made
        most = space + self._costs.holes_bytes + _of(stage.gradient_bytes, action) + _of(stage.first_bytes, action)
        return max(during, most), after + stage.made_bytes


class _Shards:
    """What is gathered and reduced between the passes, and inside of them."""

    def __init__(self, actions: Sequence[Action], costs: RankCosts) -> None:
        self._costs = costs
        self._gathered = {bucket: size for of in costs.gathered_bytes.values() for bucket, size in of.items()}
        self._pending: deque[Reduction] = deque()
        self._last = {a.stage: a for a in actions if a.kind in ("B", "W") and _of(costs.stages[a.stage].kept_bytes, a)}

    def passed(self, action: Action, change: Change) -> Change:
        """Inside the last backward of a stage buckets are reduced as they fill."""
        if not self._costs.reductions or self._last.get(action.stage) != action:
            return change
        stage, (during, after) = self._costs.stages[action.stage], change
        own = [each for each in self._costs.reductions.values() if each.stage == action.stage]
        if not own:  # its buckets are there; their sums come besides
            sums = max((each.own for each in self._costs.reductions.values()), default=0)
            return during + BUCKETS_UNDER_WAY * sums, after
        alone = stage.made_bytes - sum(each.own for each in own)
        before = sum(each.bytes for each in self._pending)
        most = max(self._open(own, each.opens) - before - each.released for each in own)
        passing = self._costs.workspace_bytes + _of(stage.gradient_bytes, action) + _of(stage.redone_bytes, action)
        return max(during, passing + alone + most), after

    def _open(self, own: Sequence[Reduction], place: int) -> int:
        """What there is of the buckets of a stage when its backward comes to an op: those that fill, those under way, the rest reduced."""
        complete = [each for each in own if each.closes > place]
        row = [*self._pending, *complete]
        under_way, ended = row[-BUCKETS_UNDER_WAY:], complete[: max(0, len(complete) - BUCKETS_UNDER_WAY)]
        filling = sum(
            each.bytes + (each.own if each.closes == place else 0)  # or it is under way already
            for each in own
            if each.opens >= place >= each.closes
        )
        return filling + sum(each.bytes + each.own for each in under_way) + sum(each.own for each in ended)

    def change(self, action: Action) -> Change:
        if action.kind == "SCATTER":
            reduced = None if action.index is None else self._costs.reductions.get(action.index)
            return (0, 0) if reduced is None else self._reduced(reduced)
        size = 0 if action.index is None else self._gathered.get(action.index, 0)
        match action.kind:
            case "UNSHARD":
                return size, size
            case "RESHARD":
                return 0, -size
            case _:
                return 0, 0

    def _reduced(self, bucket: Reduction) -> Change:
        """A few are under way; when one more begins, the first is waited for."""
        self._pending.append(bucket)
        comes = (bucket.own if bucket.stage is None else 0) + (
            bucket.bytes if bucket.stage is not None or not bucket.made else 0
        )
        goes = self._pending.popleft().bytes if len(self._pending) > BUCKETS_UNDER_WAY else 0
        return max(0, comes - (goes if bucket.stage is not None else 0)), comes - goes

    def settled(self) -> int:
        """What goes when all is reduced."""
        gone = sum(each.bytes for each in self._pending)
        self._pending.clear()
        return gone


def _table(actions: Sequence[Action], costs: RankCosts) -> dict[str, dict[int, list[Change]]]:
    """The changes of the passes, by kind, stage and micro-batch."""
    again = {number: stage for number, stage in costs.stages.items() if any(stage.recomputed_bytes)}
    ahead = {(a.stage, a.index) for a in actions if a.kind == "R"} if again else set()
    back = {(a.stage, a.index) for a in actions if a.kind == "RELOAD"}
    made: dict[str, dict[int, list[Change]]] = {kind: {} for kind in ("F", "B", "I", "W", "R", "RELOAD")}
    for number, stage in costs.stages.items():
        rows = [
            _of_micro_batch(stage, index, costs, (number, index) in ahead, (number, index) in back)
            for index in range(len(stage.forward_s))
        ]
        for place, of_kind in enumerate(made.values()):
            of_kind[number] = [row[place] for row in rows]
    return made


def _of_micro_batch(stage: StageCosts, index: int, costs: RankCosts, ahead: bool, back: bool) -> tuple[Change, ...]:
    """F, B, I, W, R, RELOAD of one micro-batch; ``ahead``: R comes before its backward, ``back``: RELOAD does."""
    space = costs.workspace_bytes
    kept, again, left = _at(stage.kept_bytes, index), _at(stage.recomputed_bytes, index), _at(stage.weight_bytes, index)
    reloaded = _at(stage.reloaded_bytes, index)
    alive = kept + (again if ahead else 0) + (reloaded if back else 0)
    during = space + _at(stage.gradient_bytes, index) + (0 if ahead else _at(stage.redone_bytes, index))
    return (
        (kept + space, kept),
        (during + costs.holes_bytes, -alive),
        (during + max(0, left - alive), left - alive),
        (space, -left),
        (again + space, again),
        (reloaded, reloaded),
    )


def _at(values: Sequence[int], index: int) -> int:
    return values[index] if values else 0


def _of(values: Sequence[int], action: Action) -> int:
    return 0 if action.index is None else _at(values, action.index)
