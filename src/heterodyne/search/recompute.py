"""Selective recompute: which blocks of a stage are recomputed, and which of their ops keep their outputs: just enough for its memory, at
the least extra time.

A recomputed block frees its activations, except its inputs and what its ops keep, of each micro-batch in flight, and costs the
recomputation. Two nested knapsacks. What ops keep is chosen for all alike blocks at once: those that save most seconds per byte first,
as many as turn out best, then one more or one less while that is better. At each such level the blocks with the most bytes freed per
second go first, until the rest fits. Keeping nothing is one of the levels, so whatever can fit does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from heterodyne.cost.model import CostModel
from heterodyne.cost.recomputation import parts_again
from heterodyne.graph.ir import Block
from heterodyne.graph.size import Size
from heterodyne.plan.kept import names_of
from heterodyne.plan.plan import Pipeline, Stage
from heterodyne.search.predict import with_stages

__all__ = ["recomputed"]

Keep = tuple[str, ...]


def recomputed(
    model: CostModel, pipeline: Pipeline, short: Mapping[str, int], in_flight: Sequence[int], alive: Mapping[int, Size]
) -> Pipeline:
    """The pipeline with blocks to recompute on the devices that are short of memory.

    Args:
        short: for each device the bytes that it lacks if everything is kept; nothing for those that lack nothing.
        in_flight: for each stage how many micro-batches it holds at a time.
        alive: what crosses the positions at which blocks begin, as far as they are known.
    """
    again: dict[int, set[int]] = {}
    keep: dict[int, Keep] = {}
    for device, lacking in short.items():
        chosen = _Choice(model=model, pipeline=pipeline, device=device, in_flight=in_flight, alive=alive).best(lacking)
        for stage, block in chosen.taken:
            again.setdefault(stage, set()).add(block)
            # Of devices that share a stage, what all can bear is kept.
            both = [name for name in keep.get(stage, chosen.keep) if name in chosen.keep]
            keep[stage] = tuple(both)
    if not again:
        return pipeline
    return with_stages(pipeline, lambda n, stage: _with(model, stage, tuple(sorted(again.get(n, ()))), keep.get(n, ())))


def _with(model: CostModel, stage: Stage, blocks: tuple[int, ...], keep: Keep) -> Stage:
    known = names_of(model.graph, *(model.graph.blocks[index] for index in blocks))
    return stage.model_copy(update={"recompute": blocks, "keep": tuple(sorted(name for name in keep if name in known))})


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """``taken``: (stage, block) pairs; ``seconds``: of what they do again in a micro-batch; ``enough``: whether the rest fits."""

    taken: list[tuple[int, int]]
    keep: Keep
    seconds: float
    enough: bool


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """Of one device."""

    model: CostModel
    pipeline: Pipeline
    device: str
    in_flight: Sequence[int]
    alive: Mapping[int, Size]

    @property
    def _size(self) -> int:
        return max(self.pipeline.micro_batches.sizes)

    def best(self, lacking: int) -> _Chosen:
        """What takes the fewest seconds of that which frees enough; all that can be freed if nothing does."""
        order = self._order()
        found = self._at((), lacking)
        for count in range(1, len(order) + 1):
            found = self._better(found, order[:count], lacking)
        before = None
        while found.keep != before:
            before = found.keep
            for name in order:
                other = tuple(n for n in order if (n == name) != (n in before))
                found = self._better(found, other, lacking)
        return found

    def _better(self, found: _Chosen, keep: Keep, lacking: int) -> _Chosen:
        other = self._at(keep, lacking)
        return other if other.enough and other.seconds < found.seconds else found

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        for number, stage in enumerate(self.pipeline.stages):
            for block in self.model.graph.blocks if self.device in stage.devices else ():
                if stage.ops[0] <= block.start < block.stop <= stage.ops[1] and block.start in self.alive:
                    yield number, block

    def _order(self) -> Keep:
        """What ops may keep, what saves most seconds a byte first."""
        saves: dict[str, list[float]] = {}
        kinds = {block.kind: block for _, block in reversed(list(self._blocks()))}
        for block in kinds.values():
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

    def _at(self, keep: Keep, lacking: int) -> _Chosen:
        """The best blocks first, until enough is freed; all of them if it never is."""
        options = []
        of_kind: dict[str, tuple[float, float, int]] = {}
        for number, block in self._blocks():
            if block.kind not in of_kind:
                of_kind[block.kind] = self._again(block, keep)
            seconds, kept, held = of_kind[block.kind]
            frees = self.in_flight[number] * (held - kept - self.alive[block.start](self._size))
            if frees > 0:
                rank = -frees / seconds if seconds > 0 else float("-inf")
                options.append((rank, number, block.index, frees, held, seconds))
        taken: list[tuple[int, int]] = []
        freed, again, total = 0.0, 0, 0.0
        for _, number, index, frees, held, seconds in sorted(options):
            if freed - again >= lacking:
                break
            taken.append((number, index))
            freed += frees
            again = max(again, held)  # while it is recomputed, one block is there once
            total += seconds
        return _Chosen(taken=taken, keep=keep, seconds=total, enough=freed - again >= lacking)
