"""The menu from which a device that lacks memory chooses which activations it does not keep: recompute, or host offload.

A block that gives relief frees its activations in each micro-batch in flight, and costs seconds. A device takes the least seconds a byte
first, until the rest fits: the greedy solution of a knapsack of many small things. What recomputed ops keep is one more choice, made for
all alike blocks at once: those that save most seconds per byte first, as many as turn out best, then one more or one less while that is
better. Keeping nothing is one of the choices, so whatever can fit does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, Literal, NamedTuple, TypeAlias

from heterodyne.cost.model import CostModel
from heterodyne.cost.recomputation import parts_again
from heterodyne.graph.ir import Block
from heterodyne.graph.size import Size
from heterodyne.plan.kept import names_of
from heterodyne.plan.plan import Pipeline, Stage
from heterodyne.search.predict import with_stages

__all__ = ["ACTIONS", "Action", "Actions", "Relief", "choices_of", "reloading", "with_relief"]

Action: TypeAlias = Literal["recompute", "host"]
Actions: TypeAlias = tuple[Action, ...]
Keep: TypeAlias = tuple[str, ...]
ACTIONS: Final[Actions] = ("recompute", "host")
_AT_A_TIME = {"recompute": 1, "host": 3}
"""Blocks whose activations are on the device at a time: the one in use, and on hosts one that leaves and one that comes back."""


class Relief(NamedTuple):
    """What a device gains and pays if a block of a stage does not keep its activations.

    Args:
        frees: bytes, in all micro-batches in flight. held: bytes that are there while the block is in use.
        seconds: per micro-batch.
        turn: of reliefs with the same price the lowest is taken first.
    """

    stage: int
    block: int
    action: Action
    frees: float
    held: int
    seconds: float
    turn: tuple[int, int]

    @property
    def price(self) -> float:
        """Seconds a byte."""
        return self.seconds / self.frees


class _Chosen(NamedTuple):
    """``seconds``: of a micro-batch; ``enough``: whether the rest fits."""

    taken: tuple[Relief, ...]
    keep: Keep
    seconds: float
    enough: bool


def choices_of(
    model: CostModel, devices: Collection[str], allowed: Collection[Action] = ACTIONS
) -> tuple[Actions, ...]:
    """What these devices may choose from: each action alone, and all. Hosts help those that have one apart from themselves, with
    measured copies there."""
    hosts = all(
        model.cluster.device(device).backend != "cpu" and model.measured(device).host_copy_s_per_byte > 0
        for device in devices
    )
    there = tuple(action for action in allowed if hosts or action != "host")
    return tuple(dict.fromkeys((*((action,) for action in there), there))) if there else ()


def with_relief(
    model: CostModel,
    pipeline: Pipeline,
    lacks: Mapping[str, int],
    in_flight: Sequence[int],
    alive: Mapping[int, Size],
    actions: Actions,
) -> Pipeline:
    """The pipeline with relief for the devices that lack memory; as much as there is where that is not enough.

    Args:
        lacks: for each device the bytes that it lacks if everything is kept; nothing for those that lack nothing.
        in_flight: for each stage how many micro-batches it holds at a time.
        alive: what crosses the positions at which blocks begin, as far as they are known.
    """
    blocks: dict[tuple[Action, int], set[int]] = {}
    keep: dict[int, Keep] = {}
    for device, lacking in lacks.items():
        menu = _Menu(model, pipeline, device, in_flight, alive, actions)
        chosen = menu.best(lacking)
        for relief in chosen.taken:
            blocks.setdefault((relief.action, relief.stage), set()).add(relief.block)
            # Of devices that share a stage, what all can bear is kept.
            both = [name for name in keep.get(relief.stage, chosen.keep) if name in chosen.keep]
            keep[relief.stage] = tuple(both)
    if not blocks:
        return pipeline

    def changed(number: int, stage: Stage) -> Stage:
        again = blocks.get(("recompute", number), set())
        away = blocks.get(("host", number), set()) - again
        known = names_of(model.graph, *(model.graph.blocks[index] for index in sorted(again)))
        return stage.model_copy(
            update={
                "recompute": tuple(sorted(again)),
                "keep": tuple(sorted(name for name in keep.get(number, ()) if name in known)),
                "offload_activations": tuple(sorted(away)),
            }
        )

    return with_stages(pipeline, changed)


def reloading(pipeline: Pipeline) -> Iterator[Pipeline]:
    """The same with activations that begin to come back before their backwards, where places wait for each other anyway."""
    if len(pipeline.places) < 2 or not any(stage.offload_activations for stage in pipeline.stages):
        return
    for ahead in (0, 1):

        def changed(_: int, stage: Stage, ahead: int = ahead) -> Stage:
            return stage.model_copy(update={"reload_ahead": ahead}) if stage.offload_activations else stage

        yield with_stages(pipeline, changed)


@dataclass(frozen=True)
class _Menu:
    """Of one device."""

    model: CostModel
    pipeline: Pipeline
    device: str
    in_flight: Sequence[int]
    alive: Mapping[int, Size]
    actions: Actions

    def best(self, lacking: int) -> _Chosen:
        """What takes the fewest seconds of that which frees enough; all that can be freed if nothing does."""
        hosts = [*self._hosted()] if "host" in self.actions else []
        order = self._order() if "recompute" in self.actions else ()
        found = self._at((), lacking, hosts)

        def better(keep: Keep) -> _Chosen:
            other = self._at(keep, lacking, hosts)
            return other if other.enough and other.seconds < found.seconds else found

        for count in range(1, len(order) + 1):
            found = better(order[:count])
        before = None
        while found.keep != before:
            before = found.keep
            for name in order:
                found = better(tuple(n for n in order if (n == name) != (n in before)))
        return found

    def _at(self, keep: Keep, lacking: int, hosts: Sequence[Relief]) -> _Chosen:
        """The cheapest first, one for each block, until enough is freed; all of them if it never is."""
        offered = [*hosts, *(self._recomputed(keep) if "recompute" in self.actions else ())]
        taken: dict[tuple[int, int], Relief] = {}
        freed, held = 0.0, dict.fromkeys(self.actions, 0)
        for relief in sorted(offered, key=lambda relief: (relief.price, relief.turn)):
            if freed - sum(held.values()) >= lacking:
                break
            if taken.setdefault((relief.stage, relief.block), relief) is relief:
                freed += relief.frees
                held[relief.action] = max(held[relief.action], _AT_A_TIME[relief.action] * relief.held)
        seconds = sum(relief.seconds for relief in taken.values())
        return _Chosen(tuple(taken.values()), keep, seconds, freed - sum(held.values()) >= lacking)

    def _recomputed(self, keep: Keep) -> Iterator[Relief]:
        of_kind: dict[str, tuple[float, float, int]] = {}
        for number, own in self._stages():
            for block in own:
                if block.start not in self.alive:
                    continue
                if block.kind not in of_kind:
                    of_kind[block.kind] = self._again(block, keep)
                seconds, kept, held = of_kind[block.kind]
                frees = self.in_flight[number] * (held - kept - self.alive[block.start](self._size))
                if frees > 0:
                    yield Relief(number, block.index, "recompute", frees, held, seconds, (number, block.index))

    def _hosted(self) -> Iterator[Relief]:
        """A copy hides behind what is computed until the next one may begin. So blocks that are as far apart as a copy takes pay only
        for what still shows, and those between them pay for all; of the same price the first goes first, for most is behind it."""
        size, compute = self._size, self.model.compute[self.device]
        s_per_byte = self.model.host_copy_s_per_byte(self.device)
        for number, own in self._stages():
            held = [self.model.device_memory[self.device].activations(size, (b.start, b.stop)) for b in own]
            passes = [[compute.seconds(kind, (b.start, b.stop), size) for b in own] for kind in ("F", "B")]
            shortest_s = min(map(sum, passes))
            apart = min(len(own), ceil(s_per_byte * sum(held) / shortest_s)) if shortest_s > 0 else 1
            for place, (block, bytes_) in enumerate(zip(own, held, strict=True)):
                copy_s, behind = s_per_byte * bytes_, slice(place + 1, place + 1 + apart)
                shows = [copy_s if place % apart else max(0.0, copy_s - sum(each[behind])) for each in passes]
                frees = self.in_flight[number] * bytes_
                if frees > 0:
                    turn = (place - len(own), number)
                    yield Relief(number, block.index, "host", frees, bytes_, sum(shows), turn)

    def _order(self) -> Keep:
        """What ops may keep, what saves most seconds a byte first."""
        saves: dict[str, list[float]] = {}
        blocks = [block for _, own in self._stages() for block in own if block.start in self.alive]
        for block in {block.kind: block for block in reversed(blocks)}.values():
            plain = self._again(block, ())
            for name in names_of(self.model.graph, block):
                seconds, kept, _ = self._again(block, (name,))
                if plain[0] > seconds and kept > 0:
                    total = saves.setdefault(name, [0.0, 0.0])
                    total[0] += plain[0] - seconds
                    total[1] += kept
        return tuple(sorted(saves, key=lambda name: (-saves[name][0] / saves[name][1], name)))

    def _again(self, block: Block, keep: Keep) -> tuple[float, float, int]:
        """Seconds of what a block does again, bytes of what its ops keep, and of all that it would keep."""
        model, size = self.model, self._size
        (part,) = parts_again(model.graph, (block.start, block.stop), (block.index,), keep)
        held = model.device_memory[self.device].activations(size, part.ops)
        return model.passes.again_s(self.device, part, size), part.kept_bytes(model.graph, size, held), held

    def _stages(self) -> Iterator[tuple[int, list[Block]]]:
        """The whole blocks of each stage of the device."""
        for number, stage in enumerate(self.pipeline.stages):
            if self.device in stage.devices:
                start, stop = stage.ops
                yield number, [b for b in self.model.graph.blocks if start <= b.start < b.stop <= stop]

    @property
    def _size(self) -> int:
        return max(self.pipeline.micro_batches.sizes)
