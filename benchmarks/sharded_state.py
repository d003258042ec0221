"""Collectives of unequal shards, and training with sharded state: bytes, seconds under shaped links, and against what PyTorch does.

Shares 1 : 2 : 4 of one flat tensor of fp32 are summed (reduce-scatter) and gathered by three workers in network namespaces of their own,
all links alike. No way is faster than max over ranks of (N - s) / B: a rank sends all but what it keeps, and B is what a plain send
reaches over these links. Beside it the usual form, which pads every shard to the largest one, moved by the same ring. Then equal shares
against gloo's own `reduce_scatter_tensor`. Then a GPT on unequal workers, whole state against sharded state. Last a step
with sharded parameters (ZeRO-3) on equal workers beside that of PyTorch's FSDP2 (`fsdp2.py` says how), once with slow links, where all
that counts is what is sent and what hides it, and once with none, where it is what processors do besides computing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from emulation import EQUAL, emulated, in_rounds, ratios, worker_arguments
from fsdp2 import FSDP2, OURS, Steps, against_fsdp2
from results import ROOT, Results, arguments, spread

HERE = Path(__file__)
SHARES = (1, 2, 4)
GLOO_HEAD = "gloo's reduce_scatter_tensor"


@dataclass(frozen=True, kw_only=True)
class Size:
    """``elements`` of fp32 a collective, over links of ``bytes_per_s``; a model of ``layers`` and ``width`` for the steps."""

    elements: int
    bytes_per_s: float
    rounds: int
    layers: int
    width: int
    steps: int


FULL = Size(elements=7 * 2**20, bytes_per_s=25e6, rounds=6, layers=6, width=384, steps=2)
QUICK = Size(elements=7 * 2**18, bytes_per_s=12.5e6, rounds=3, layers=2, width=128, steps=2)

FSDP2_FULL = {
    "links": (Steps(layers=6, width=384, length=64, samples=2, rounds=8, steps=1), "25MB/s", "<= 0.80"),
    "computing": (Steps(layers=6, width=256, length=128, samples=8, rounds=8, steps=1), None, "<= 1.0"),
}
FSDP2_QUICK = {
    "links": (Steps(layers=3, width=256, length=64, samples=2, rounds=3, steps=1), "25MB/s", "<= 0.80"),
    "computing": (Steps(layers=3, width=256, length=128, samples=4, rounds=3, steps=1), None, "<= 1.0"),
}


def main() -> int:
    options = arguments(__doc__)
    results = Results("sharded_state")
    size = QUICK if options.quick else FULL
    links = f"{size.bytes_per_s / 1e6:g} MB/s"
    found = emulated((0.6,) * 3, ["collectives"], size, HERE, links=links)
    total = 4 * size.elements
    most = total * (1 - SHARES[0] / sum(SHARES))
    bound_s = most / total * median(found["a plain send"])
    results.row(
        "a plain send of all bytes", seconds=spread(found["a plain send"]), as_shaped_s=total / size.bytes_per_s
    )
    for what in ("reduce-scatter", "all-gather"):
        own, padded = found[f"{what} in parts"], found[f"{what} padded"]
        results.row(f"{what}, shares 1:2:4", seconds=spread(own), padded_s=spread(padded), bound_s=bound_s)
        results.bar(f"{what}: seconds over the bound", median(own) / bound_s, "<= 1.05")
        results.bar(f"{what}: over the padded form", median(a / b for a, b in zip(own, padded, strict=True)), "<= 0.80")
    sent = found["sent bytes"]
    kept = [total * share // sum(SHARES) for share in SHARES]
    results.row("bytes sent in a reduce-scatter, by rank", **{f"rank_{rank}": each for rank, each in enumerate(sent)})
    results.bar("bytes beyond N - s", max(each - (total - own) for each, own in zip(sent, kept, strict=True)), "<= 0")
    equal = [a / b for a, b in zip(found["reduce-scatter equal"], found[GLOO_HEAD], strict=True)]
    results.row(
        "equal shares: ours over gloo's own", ratio=spread(equal), seconds=spread(found["reduce-scatter equal"])
    )
    results.bar("equal shares over gloo's reduce_scatter_tensor", median(equal), "<= 0.55")

    steps = emulated((0.7, 0.35, 0.35), ["whole", "sharded"], size, HERE)
    results.row("a step with whole state", seconds=spread(steps["whole"]), state_bytes=steps["whole bytes"])
    results.row("a step with sharded state", seconds=spread(steps["sharded"]), state_bytes=steps["sharded bytes"])
    results.row("sharded over whole", step_ratio=spread(ratios([steps], "sharded", "whole")))
    results.bar("step with sharded over whole state", median(ratios([steps], "sharded", "whole")), "<= 1.05")
    beside_fsdp2(results, quick=options.quick)
    return results.write(options.json)


def beside_fsdp2(results: Results, *, quick: bool) -> None:
    """Equal workers, once bound by links and once by computing."""
    for bound, (size, links, bar) in (FSDP2_QUICK if quick else FSDP2_FULL).items():
        found = emulated(EQUAL, ["fsdp2"], size, HERE, links=links)
        both = ratios([found], OURS, FSDP2)
        for way in (OURS, FSDP2):
            results.row(f"{way}, bound by {bound}", step_s=spread(found[way]))
        results.row(f"ours over FSDP2, bound by {bound}", step_ratio=spread(both), gradients_apart=found["apart"])
        results.bar(f"ZeRO-3 step over FSDP2's, bound by {bound}", median(both), bar)


def ranges_of(shares: tuple[int, ...], elements: int) -> list[tuple[int, int]]:
    from heterodyne.plan.state_shards import cut_by_shares

    return list(cut_by_shares(elements, shares))


def collectives(size: Size, out: Path) -> None:
    import torch
    import torch.distributed as dist

    import heterodyne as hd
    from heterodyne.runtime.comm import ring
    from heterodyne.runtime.comm.process_group import ProcessGroup

    with hd.open_session() as session:
        communicator = session.communicator
        ranks = communicator.world_size
        group = dist.new_group(list(range(ranks)), backend="gloo")
        process_group = ProcessGroup(range(ranks), group, device=torch.device("cpu"), via_host=False)
        flat = torch.zeros(size.elements)
        own = ranges_of(SHARES, size.elements)
        largest = max(stop - start for start, stop in own)
        wide = torch.zeros(ranks * largest)
        even, of_padded = ranges_of((1,) * ranks, size.elements), ranges_of((1,) * ranks, wide.numel())
        part, whole = torch.zeros(size.elements // ranks), torch.zeros(size.elements // ranks * ranks)
        run: dict[str, Callable[[], object]] = {
            "reduce-scatter in parts": lambda: process_group.reduce_scatter_ranges(flat, own).wait(),
            "reduce-scatter padded": lambda: process_group.reduce_scatter_ranges(wide, of_padded).wait(),
            "all-gather in parts": lambda: process_group.all_gather_ranges(flat, own).wait(),
            "all-gather padded": lambda: process_group.all_gather_ranges(wide, of_padded).wait(),
            "reduce-scatter equal": lambda: process_group.reduce_scatter_ranges(flat, even).wait(),
            "a plain send": lambda: plain_send(flat, communicator.rank),
            GLOO_HEAD: lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        }
        sent: list[int] = []
        send = dist.isend

        def counting(tensor: torch.Tensor, **where: Any) -> Any:
            sent.append(tensor.nbytes)
            return send(tensor, **where)

        ring.dist.isend = counting
        run["reduce-scatter in parts"]()
        ring.dist.isend = send
        by_rank = communicator.all_gather_object(sum(sent))
        measured = in_rounds(run, communicator, rounds=size.rounds, steps=1)
        if communicator.rank == 0:
            out.write_text(json.dumps({**measured.seconds, "sent bytes": by_rank}))
        process_group.close()


def plain_send(flat: Any, rank: int) -> None:
    import torch.distributed as dist

    if rank == 0:
        dist.send(flat, 1)
    elif rank == 1:
        dist.recv(flat, 0)


def training(size: Size, out: Path) -> None:
    import torch

    import heterodyne as hd
    from heterodyne.job import OptimizerSection

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return build(length=64, width=size.width, layers=size.layers, heads=4)

    tokens = torch.randint(0, 256, (32, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    with hd.open_session() as session:
        first = hd.distribute(
            model(),
            batch,
            optimizer=OptimizerSection(lr=1e-4),
            plan=hd.PlanOptions("data", measure_s=10),
            session=session,
        )
        plan = first.plan.model_copy(update={"zero": 0, "pipelines": tuple(map(bare, first.plan.pipelines))})
        made = {
            way: hd.distribute(
                model(),
                batch,
                optimizer=OptimizerSection(lr=1e-4),
                session=session,
                plan=hd.PlanOptions(plan.model_copy(update={"zero": zero}), profile=first.profile),
            )
            for way, zero in (("whole", 0), ("sharded", 1))
        }
        run: dict[str, Callable[[], object]] = {way: (lambda d=d: d.step(batch)) for way, d in made.items()}
        found = in_rounds(run, session.communicator, rounds=size.rounds, steps=size.steps)
        kept = {
            f"{way} bytes": session.communicator.all_gather_object(
                sum(t.nbytes for of in d.optimizer.state.values() for t in of.values() if torch.is_tensor(t))
            )
            for way, d in made.items()
        }
        if session.rank == 0:
            out.write_text(json.dumps({**found.seconds, **kept}))


def bare(pipeline: Any) -> Any:
    stages = tuple(stage.model_copy(update={"state_shares": None}) for stage in pipeline.stages)
    return pipeline.model_copy(update={"stages": stages})


if __name__ == "__main__":
    given = worker_arguments()
    if given is None:
        sys.exit(main())
    if given.ways == ["fsdp2"]:
        against_fsdp2(Steps(**given.size), given.out)
    else:
        (collectives if given.ways == ["collectives"] else training)(Size(**given.size), given.out)
