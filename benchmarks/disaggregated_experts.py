"""Attention on some workers, experts on others: against every other plan that the planner makes, and in simulation against expert parallelism.

Two fast and two slow emulated workers (CPU quotas) train a Hugging Face Mixtral of 8 layers whose experts are most of its work. The ways
are the plan with experts on a place of their own, and of each other kind the best that the same search finds: they take turns in the same
processes. Loss and gradients, with the loss that balances the experts, are compared with those of one device. In simulation the devices
are A40 and V100 at 200 Gb/s, where each kind is good at something else (HeterMoE, Wu et al., 2025): ideal expert parallelism shares all work
by speed, exchanges tokens at the full rate of the links and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from emulation import emulated, ratios, worker_arguments
from hand_made import Rig
from pace import Pace, run_in_turns
from results import Results, arguments, spread

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from heterodyne.predictor.datasheet_profile import believed_cluster, datasheet_profile
from heterodyne.search.planned import Candidate, Planned
from heterodyne.search.planner import plan

if TYPE_CHECKING:
    import torch

APART = "experts apart"
SPEEDS, FUSED = (0.45, 0.45, 0.35, 0.35), 2
"""Of the workers; so many of them, the first, have a fused kernel for attention, as new accelerators do."""
_KIND = {
    "balanced": "data parallel",
    "equal": "data parallel",
    "pipeline": "pipeline",
    "replicas": "pipelines",
    "split": "split",
}
GBIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Size:
    """``steps`` of each way in each of the ``rounds``, of ``samples`` sequences of ``length`` tokens each."""

    width: int
    inner: int
    experts: int
    layers: int
    samples: int
    length: int
    rounds: int
    steps: int
    budget_s: float


FULL = Size(width=128, inner=512, experts=8, layers=8, samples=8, length=1024, rounds=3, steps=1, budget_s=60)
QUICK = Size(width=64, inner=192, experts=8, layers=8, samples=8, length=256, rounds=2, steps=1, budget_s=10)


def mixtral(size: Size, *, balanced: bool = False, vocabulary: int = 256, heads: int = 4) -> torch.nn.Module:
    """``balanced``: with the loss that balances its experts."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=vocabulary, hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=size.length,
            num_local_experts=size.experts, num_experts_per_tok=2, tie_word_embeddings=False, attn_implementation="sdpa",
            use_cache=False, output_router_logits=balanced,
        )
    )  # fmt: skip


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch

    import heterodyne as hd

    tokens = torch.randint(0, 256, (size.samples, size.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    sizes = tuple(n for n in (1, 2) if n <= size.samples)
    with hd.open_session() as session:
        torch.backends.cuda.enable_flash_sdp(session.rank < FUSED)  # it is that of processors too
        rig = Rig.of(session, mixtral(size), batch, sizes, size.budget_s)
        found = chosen_ways(planned(rig, size, sizes)) if session.rank == 0 else None
        plans = {
            way: Plan.parse(text)
            for way, text in session.communicator.broadcast_object(
                None if found is None else {way: own.plan.dump() for way, own in found.items() if own.plan}, 0
            ).items()
        }
        if session.rank == 0:
            for way, own in found.items():
                print(way, own.name, own.step_s)
        pace = Pace(rig, mixtral(size), {name: value[:2] for name, value in batch.items()})
        workers = {way: rig.worker(own, mixtral(size)) for way, own in plans.items()}
        run: dict[str, Callable[[], object]] = {way: (lambda w=w: w.step(batch)) for way, w in workers.items()}
        run_in_turns(
            rig,
            run,
            plans,
            pace,
            options.out,
            rounds=size.rounds,
            steps=size.steps,
            names={} if found is None else {w: c.name for w, c in found.items()},
        )
        for made in workers.values():
            made.close()


def planned(rig: Rig, size: Size, sizes: tuple[int, ...]) -> Planned:
    p = plan(
        rig.captured.graph,
        rig.session.cluster,
        rig.profile,
        global_batch_size=size.samples,
        micro_batch_sizes=sizes,
        clip=False,
        near=3.0,
    )
    from heterodyne.search.explain import alternatives

    for row in alternatives(p):
        print(row.step_s, row.name, row.note[:80])
    return p


def chosen_ways(found: Planned) -> dict[str, Candidate]:
    """The best with experts apart, and of each other kind the best."""
    best: dict[str, Candidate] = {}
    for candidate in sorted((c for c in found.candidates if c.plan is not None), key=lambda c: c.weighed_s):
        way = APART if candidate.name.startswith("attention on") else _KIND.get(candidate.kind)
        if way is not None:
            best.setdefault(way, candidate)
    return best


if __name__ == "__main__":
    own = worker_arguments()
    if own is None:
        options = arguments(__doc__)
        size = QUICK if options.quick else FULL
        job = emulated(SPEEDS, [APART], size, Path(__file__))
        print(
            {k: median(v) for k, v in job.items() if isinstance(v, list) and k != "paces"},
            job["predicted"],
            job["names"],
            job["paces"],
        )
    else:
        worker(own, Size(**own.size))
