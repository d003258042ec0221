"""Is the plan that is chosen the fastest, and how long does each take? Emulated clusters and models; the chosen plan runs beside others.

Each cluster has two to four workers, whose speeds add up to less than the cores of this machine; each model is a small GPT, a Llama or a
mixture of experts. In two cases of five nothing obvious will do: no device may hold the model whole (what the planner is told of its
memory), or the workers are joined by slow links (shaped, in network namespaces), so that pipelines, stages in parts and sharded state are
what is left. Everything is as in any job: measured, planned, tried, rehearsed. The others are those that the planner thought best
after its own choice, and the first by prediction alone is among them. All take turns in the same processes; the first step of a turn
does not count, for in training each step follows another one of the same plan. What is predicted to take twice as long as the choice is
left out. The same seed gives the same clusters and models, so a part of the cases (``--cases 0-4``) can be measured by itself: rows of
other cases that are in the JSON file already are kept, and the bars are those of all.

It needs two cores that nobody else uses: speeds mean nothing on a core that is taken. The load of the machine before each case is told,
and the pace of each device beside the runs over that of its profile: far from 1, the machine has changed and not the prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from emulation import emulated, in_rounds, worker_arguments
from hand_made import Rig
from pace import Pace, at_pace
from results import Results, arguments, spread

from heterodyne.plan.plan import Plan

if TYPE_CHECKING:
    import torch

    from heterodyne.search.planned import Candidate

CHOSEN = "chosen"
ALL_CASES, CASES, QUICK_CASES = (
    20,
    6,
    3,
)  # each takes more than a minute: workers start, measure and rehearse under a quota
_ORDER = ("plain", "memory", "links", "plain", "plain")
"""Kinds of cases, over and over."""
_PACE, _PACE_S, _PACED = "pace", 0.25, 4
"""Beside the plans the devices compute for themselves, for so long, with so many samples at once."""
_TOGETHER = 1.7
"""Of two cores; the rest is left to the system."""
_NEAR = 1.03
_FAR = 2.0
"""Times the prediction of the choice: plans that are predicted to take longer say nothing of it, and take the time of all others."""
_RUN_S, _FEWEST_ROUNDS, _TURN_S = 16.0, 5, 0.3
"""Rounds go on for about so long, but are as many at least; in each the choice takes as many steps as take so long."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, a batch, and how long it is looked at. ``room``: what part of the whole model each device may hold; none: all of it."""

    kind: str
    width: int
    layers: int
    samples: int
    length: int
    rounds: int
    budget_s: float
    others: int = 5
    room: tuple[float, ...] = ()


def main() -> int:
    options = arguments(
        __doc__, whole=f"{ALL_CASES} cases, not the first {CASES}", part=f"such as 0-4, of 0-{ALL_CASES - 1}"
    )
    count = QUICK_CASES if options.quick else ALL_CASES if options.all else CASES
    wanted = range(count) if options.cases is None else options.cases
    rows = {} if options.cases is None else known_rows(options.json)
    chance = random.Random(20)
    for number in range(max(wanted, default=-1) + 1):
        drawn = case(chance, number, quick=options.quick)
        if number in wanted:
            rows[number] = measured(number, *drawn)
            with redirect_stdout(StringIO()):  # who is stopped has the cases until then
                judged(rows).write(options.json)
    return judged(rows).write(options.json)


def known_rows(path: Path | None) -> dict[int, dict[str, Any]]:
    """The rows of cases that are in a file of results, by number."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {int(row["what"].split(":")[0]): row for row in rows if "errors" in row}


def measured(number: int, what: str, speeds: tuple[float, ...], size: Size, links: str | None) -> dict[str, Any]:
    """The row of one case."""
    load, began_s = os.getloadavg()[0], time.perf_counter()
    job = emulated(speeds, [CHOSEN], size, Path(__file__), links=links)
    seconds = {way: median(values) for way, values in job["seconds"].items()}
    names = {way: f"{way}: {name}" for way, name in job["names"].items()}
    fastest = min(seconds, key=lambda way: seconds[way])
    first = job["first by prediction"]
    return {
        "what": f"{number}: {' + '.join(map(str, speeds))}, {size.kind} {size.layers} x {size.width}, {size.samples} samples{what}",
        "chosen": job["names"][CHOSEN],
        "step_s": spread(job["seconds"][CHOSEN]),
        "predicted_s": job["predicted"][CHOSEN],
        "fastest": job["names"][fastest],
        "over_fastest": seconds[CHOSEN] / seconds[fastest],
        "first_by_prediction": job["names"][first],
        "first_by_prediction_over_fastest": seconds[first] / seconds[fastest],
        "fastest_was_rehearsed": fastest in job["rehearsed"],
        "limited": bool(links) or (bool(size.room) and not job["fits whole"]),
        "errors": {names[way]: round(job["predicted"][way] / own - 1, 3) for way, own in seconds.items()},
        "errors_at_pace": {names[way]: round(job["at pace"][way] / own - 1, 3) for way, own in seconds.items()},
        "paces": [round(pace, 3) for pace in job["paces"]],
        "load_before": load,
        "took_s": round(time.perf_counter() - began_s),
    }


def judged(of: Mapping[int, dict[str, Any]]) -> Results:
    """The rows of these cases, by number, and the bars."""
    results = Results("planner_here")
    rows = [of[number] for number in sorted(of)]
    for row in rows:
        results.row(**row)
    limited, count = sum(row["limited"] for row in rows), max(1, len(rows))
    results.row("cases in which no device holds the model or links are slow", cases=limited, of=len(rows))
    of_pace = [abs(error) for row in rows for error in row["errors_at_pace"].values()]
    results.row("mean error of the predictions at the pace that the devices have beside the runs", error=fmean(of_pace))
    right = sum(row["over_fastest"] <= _NEAR for row in rows)
    first = sum(row["first_by_prediction_over_fastest"] <= _NEAR for row in rows)
    errors = [abs(error) for row in rows for error in row["errors"].values()]
    results.bar("chosen plans that are the fastest or within 3% of it, of all", right / count, ">= 0.9")
    results.bar("first by prediction: the fastest or within 3% of it, of all", first / count, ">= 0.75")
    results.bar("mean error of the predictions, all plans that ran", fmean(errors), "<= 0.07")
    return results


def case(chance: random.Random, number: int, *, quick: bool) -> tuple[str, tuple[float, ...], Size, str | None]:
    """Words for it, the speeds, the model, and the links of the workers, None for those of this machine."""
    workers = chance.choice([2, 2, 3, 4])
    parts = [chance.uniform(0.25, 1.0) for _ in range(workers)]
    speeds = tuple(round(min(0.9, _TOGETHER * part / sum(parts)), 2) for part in parts)
    size = Size(
        kind=chance.choice(["gpt", "llama", "mixtral"]),
        width=chance.choice([96, 128, 192]),
        layers=chance.choice([4, 6, 8]),
        samples=chance.choice([8, 16]),
        length=64,
        rounds=3 if quick else 12,
        budget_s=6 if quick else 36,
        others=3 if quick else 5,
    )
    kind = _ORDER[number % len(_ORDER)]
    if kind == "memory":  # so much that the model is more than what is not known of the framework
        low, high = (0.65, 0.85) if workers == 2 else (0.45, 0.7)
        room = tuple(round(chance.uniform(low, high), 2) for _ in speeds)
        size = replace(size, width=256, layers=6, samples=8, room=room)
        return f", room for {' + '.join(map(str, room))} of the model", speeds, size, None
    if kind == "links":
        links = f"{chance.choice([0.1, 0.2, 0.4])}Gb/s"
        return f", links of {links}", speeds, size, links
    return "", speeds, size, None


def model_of(size: Size) -> torch.nn.Module:
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    torch.manual_seed(0)
    if size.kind == "gpt":
        config = GPT2Config(
            vocab_size=256, n_positions=size.length, n_embd=size.width, n_layer=size.layers, n_head=4, use_cache=False
        )
        return GPT2LMHeadModel(config)
    common = {
        "vocab_size": 256, "hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": size.length, "tie_word_embeddings": False, "use_cache": False,
    }  # fmt: skip
    if size.kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**common, intermediate_size=3 * size.width))
    return MixtralForCausalLM(
        MixtralConfig(**common, intermediate_size=2 * size.width, num_local_experts=4, num_experts_per_tok=2)
    )


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch

    import heterodyne as hd
    from heterodyne.search.planned import identity, serves

    tokens = torch.randint(0, 256, (size.samples, size.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    with TemporaryDirectory() as cache, hd.open_session() as session:
        os.environ["XDG_CACHE_HOME"] = cache  # nothing is believed that was measured at another time
        rig, prepared = Rig.automatic(
            session, model_of(size), batch, (1, 2, 4, 8), budget_s=size.budget_s, room=size.room
        )
        plans: dict[str, tuple[str, str]] = {}
        first, rehearsed, fits = CHOSEN, list[str](), False
        if prepared.planned is not None:
            chosen = prepared.planned.chosen
            fits = any(fits_whole(c) for c in prepared.planned.candidates)
            plans[CHOSEN] = (chosen.name, prepared.lowered.plan.dump())
            rehearsed += [CHOSEN] if chosen.rehearsed_s is not None else []
            weighed = [c for c in prepared.planned.candidates if serves(c.kind, "auto")]
            others = {
                identity(c.plan): c
                for c in sorted(weighed, key=lambda c: -c.weighed_s)
                if c.plan is not None and identity(c.plan) != identity(prepared.lowered.plan)
            }
            near = [c for c in others.values() if c.step_s is not None and c.step_s <= _FAR * (chosen.step_s or 0.0)]
            best = sorted(near, key=lambda c: c.weighed_s)[: size.others]
            for number, other in enumerate(best):
                assert other.plan is not None
                plans[f"other {number}"] = (other.name, other.plan.dump())
                if other.rehearsed_s is not None:
                    rehearsed.append(f"other {number}")
            if best and best[0].weighed_s < chosen.weighed_s:
                first = "other 0"
        # As they run here: nothing is clipped.
        predicted = {way: rig.predicted(Plan.parse(text)).step_s for way, (_, text) in plans.items()}
        steps = max(1, round(_TURN_S / predicted.get(CHOSEN, _TURN_S)))
        turn_s = sum(predicted.values()) * (1 + steps) + 2 * _PACE_S
        rounds = max(_FEWEST_ROUNDS, min(size.rounds, round(_RUN_S / turn_s)))
        plans, predicted, steps, rounds = session.communicator.broadcast_object((plans, predicted, steps, rounds), 0)
        workers = {way: rig.worker(Plan.parse(text), model_of(size)) for way, (_, text) in plans.items()}
        run = {way: (lambda w=w: w.step(batch)) for way, w in workers.items()}
        few = {name: tensor[:_PACED] for name, tensor in batch.items()}
        pace, paces = Pace(rig, model_of(size), few, seconds=_PACE_S), list[list[float]]()
        run[_PACE] = lambda: paces.append(pace())
        found = in_rounds(run, session.communicator, rounds=rounds, steps=steps, settle=1)
        for made in workers.values():
            made.close()
        if session.rank == 0:
            beside = [median(of_device) for of_device in zip(*paces, strict=True)]
            at = {way: at_pace(rig, Plan.parse(text), beside) for way, (_, text) in plans.items()}
            told = {
                "seconds": {way: [max(of_ranks) for of_ranks in found.own[way]] for way in plans},
                "at pace": at,
                "paces": beside,
                "first by prediction": first,
                "rehearsed": rehearsed,
                "fits whole": fits,
                "names": {way: name for way, (name, _) in plans.items()},
                "predicted": predicted,
            }
            options.out.write_text(json.dumps(told))


def fits_whole(candidate: Candidate) -> bool:
    """Whether it is a plan in which a device holds and trains all of the model, with all of its state."""
    plan = candidate.plan
    homes = [{d for stage in p.stages for d in stage.devices} for p in plan.pipelines] if plan is not None else []
    return plan is not None and not plan.zero and any(len(home) == 1 for home in homes)


if __name__ == "__main__":
    own = worker_arguments()
    sys.exit(main() if own is None else worker(own, Size(**own.size)))
