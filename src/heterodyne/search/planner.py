"""Chooses a plan: how to spread one global batch over unequal devices, and why so.

A step in which every device waits for the last reduction lasts as long as the slowest device's forward, backward and update, and
what of the reductions does not hide behind them. So shares are balanced on measured time curves (`search.balance`), for all
devices and for subsets of them; each proposal is lowered to its program and played on the simulator; the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import InfeasibleError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.lower import lower
from heterodyne.plan.plan import Layout, Pipeline, Plan, Prediction, Region, Stage
from heterodyne.search.explain import reason
from heterodyne.search.fit import fit_devices, nothing_fits
from heterodyne.search.planned import Candidate, Planned, Strategy
from heterodyne.search.proposals import Proposal, Proposer
from heterodyne.search.runs import Runs
from heterodyne.sim.run import Simulation, simulate

__all__ = ["own_rates", "plan", "predict"]

_MOST_REFINEMENTS = 16


def plan(
    graph: ModelGraph,
    cluster: Cluster,
    profile: Profile,
    *,
    global_batch_size: int,
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
    optimizer: Literal["adamw", "sgd"] = "adamw",
    momentum: float = 0.9,
    precision: Literal["fp32", "bf16"] = "fp32",
    bucket_bytes: int = 4 * 2**20,
    clip: bool = True,
    strategy: Strategy = "auto",
    memory: MemoryAssumptions | None = None,
    given: Plan | None = None,
) -> Planned:
    """The fastest plan by prediction, or the one that ``strategy`` names. The same arguments give the same plan.

    ``given``: a plan that somebody wrote is taken as it is, whatever its memory, and weighed against what would have been chosen.

    Raises InfeasibleError if no device can hold the model, with what each lacks; MeasureError where the profile lacks a
    measurement; PlanError if ``given`` cannot run.
    """
    if global_batch_size < 1 or not micro_batch_sizes or min(micro_batch_sizes) < 1:
        raise ValueError(f"batch {global_batch_size} and micro-batches {tuple(micro_batch_sizes)} must be positive")
    recipe = Recipe(optimizer=optimizer, momentum=momentum, precision=precision, clip=clip, bucket_bytes=bucket_bytes)
    model = CostModel(
        graph=graph, cluster=cluster, profile=profile, recipe=recipe, memory=memory or MemoryAssumptions()
    )
    fits = fit_devices(model, micro_batch_sizes, global_batch_size)
    runs = {
        fit.device.id: Runs(
            seconds=model.compute[fit.device.id].micro_batch_s, sizes=fit.sizes, fixed_s=model.fixed_s(fit.device.id)
        )
        for fit in fits
        if fit.sizes
    }
    if not runs:
        raise nothing_fits(fits, optimizer, precision)
    task = _Task(model=model, runs=runs, samples=global_batch_size)
    candidates = task.candidates(strategy)
    if given is None:
        chosen = _choose(candidates, strategy)
    else:
        made, played = predict(model, given, runs)
        chosen = Candidate(name="the given plan", kind="given", plan=made, simulation=played)
        candidates = (chosen, *candidates)
    chosen_plan, simulation = chosen.plan, chosen.simulation
    assert chosen_plan is not None  # only such are chosen
    assert simulation is not None
    final = chosen_plan.model_copy(update={"reason": reason(chosen, candidates, strategy)})
    chosen = replace(chosen, plan=final)
    candidates = tuple(chosen if c.simulation is simulation else c for c in candidates)
    sizes = {p.stages[0].devices[0]: p.micro_batches for p in final.pipelines}
    return Planned(
        plan=final,
        chosen=chosen,
        candidates=candidates,
        strategy=strategy,
        cluster=cluster,
        rates=own_rates(model, final, runs),
        compute_s={device: sum(map(model.compute[device].micro_batch_s, m.sizes)) for device, m in sizes.items()},
        composition={d: model.compute[d].composition(max(m.sizes, default=1)) for d, m in sizes.items()},
        memory={device: model.memory_use(device, max(m.sizes, default=0)) for device, m in sizes.items()},
        unfit={fit.device.id: fit.say() for fit in fits if not fit.sizes},
    )


def predict(model: CostModel, made: Plan, runs: Mapping[str, Runs]) -> tuple[Plan, Simulation]:
    """The plan with its prediction filled in, and how it plays. Raises PlanError for a plan that cannot run."""
    program = lower(made, model.graph, model.cluster, clip=model.recipe.clip)
    simulation = simulate(program, model.of(made))
    samples_per_s = made.global_batch_size / simulation.step_s if simulation.step_s > 0 else 0.0
    bound = sum(own_rates(model, made, runs).values())
    memory = {device: simulation.peak_bytes[model.cluster.rank(device)] for device in made.devices}
    prediction = Prediction(
        step_s=simulation.step_s,
        samples_per_s=samples_per_s,
        efficiency=samples_per_s / bound if 0 < bound < float("inf") else 0.0,
        memory_bytes=memory,
    )
    return made.model_copy(update={"predicted": prediction}), simulation


def own_rates(model: CostModel, made: Plan, runs: Mapping[str, Runs]) -> dict[str, float]:
    """Samples/s that each device reaches when all compute at the same time, each for itself, without communicating.

    Of a device with a share: its samples over the seconds of their forward and backward and of its optimizer step. Of a device
    that the plan leaves out: its best rate of forward and backward. Of one that cannot hold the model: 0. The efficiency of a plan is
    its samples/s over the sum; it never exceeds 1, because no step is shorter than what one device computes in it.
    """
    rates = {device.id: runs[device.id].rate if device.id in runs else 0.0 for device in model.cluster.devices}
    for pipeline in made.pipelines:
        device, samples = pipeline.stages[0].devices[0], pipeline.micro_batches.samples
        if samples == 0:
            continue
        compute = model.compute[device]
        seconds = sum(map(compute.micro_batch_s, pipeline.micro_batches.sizes)) + model.update_s(device)
        rates[device] = samples / seconds if seconds > 0 else float("inf")
    return rates


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One search: what is to be spread, over whom."""

    model: CostModel
    runs: Mapping[str, Runs]
    samples: int

    def candidates(self, strategy: Strategy) -> tuple[Candidate, ...]:
        """Everything weighed. Under a fixed count of micro-batches, of the smallest count with which what is asked for can be."""
        if not self.model.graph.batch_statistics:
            return self._weigh(self._proposer(None))
        reach = sum(run.largest for run in self.runs.values())
        for count in range(max(1, -(-self.samples // reach)), self.samples + 1):
            proposer = self._proposer(count)
            proposals = proposer.all()
            if any(_serves(p.kind, strategy, len(proposals)) and p.micro_batches for p in proposals):
                return self._weigh(proposer)
        raise InfeasibleError(f"no number of micro-batches serves {self.samples} samples on {', '.join(self.runs)}")

    def _proposer(self, count: int | None) -> Proposer:
        return Proposer(cluster=self.model.cluster, runs=self.runs, samples=self.samples, count=count)

    def _weigh(self, proposer: Proposer) -> tuple[Candidate, ...]:
        candidates = []
        seen: set[tuple[tuple[str, object], ...]] = set()
        for proposal in proposer.all():
            key = tuple(sorted((d, m.sizes) for d, m in proposal.micro_batches.items()))
            if key and key in seen and proposal.kind == "fewer":
                continue  # the balance of more devices already left the same ones without a share
            seen.add(key)
            candidates.append(self._play(proposal))
        # All devices, and the best subset: refining those that are far behind would not bring them to the front.
        for kind in ("balanced", "fewer"):
            possible = [c for c in candidates if c.kind == kind and c.step_s is not None]
            if possible:
                best = min(possible, key=lambda c: c.step_s or 0.0)
                candidates[candidates.index(best)] = self._refine(best, proposer)
        return tuple(candidates)

    def _play(self, proposal: Proposal) -> Candidate:
        if not proposal.micro_batches:
            return Candidate(name=proposal.name, kind=proposal.kind, why_not=proposal.why_not)
        made, simulation = predict(self.model, self._plan(proposal), self.runs)
        left_out = tuple(device for device in self.runs if device not in proposal.micro_batches)
        return Candidate(name=proposal.name, kind=proposal.kind, plan=made, simulation=simulation, left_out=left_out)

    def _plan(self, proposal: Proposal) -> Plan:
        graph, cluster = self.model.graph, self.model.cluster
        return Plan(
            model=graph.fingerprint,
            cluster=cluster.fingerprint,
            global_batch_size=self.samples,
            precision=self.model.recipe.precision,
            bucket_bytes=self.model.recipe.bucket_bytes,
            pipelines=tuple(
                Pipeline(
                    micro_batches=micro_batches,
                    stages=(
                        Stage(
                            ops=(0, len(graph.ops)),
                            devices=(device,),
                            regions=(Region(layout=Layout(kind="replicate", shares=(1,))),),
                        ),
                    ),
                )
                for device, micro_batches in proposal.micro_batches.items()
            ),
            idle=tuple(d.id for d in cluster.devices if d.id not in proposal.micro_batches),
        )

    def _refine(self, candidate: Candidate, proposer: Proposer) -> Candidate:
        """Move single samples from those who wait least to those who wait most, as long as the simulated step gets shorter.

        The balance sees compute alone. Which reductions hide behind whose last backward shows only when the program is played.
        """
        for _ in range(_MOST_REFINEMENTS):
            made, simulation = candidate.plan, candidate.simulation
            if made is None or simulation is None or len(made.pipelines) < 2:
                return candidate
            shares = {p.stages[0].devices[0]: p.micro_batches.samples for p in made.pipelines}
            by_wait = sorted(shares, key=lambda device: simulation.wait_s[self.model.cluster.rank(device)])
            tries = []
            for donor in by_wait[:2]:
                for taker in by_wait[:-4:-1]:
                    if donor != taker and shares[donor] > 1:
                        moved = {**shares, donor: shares[donor] - 1, taker: shares[taker] + 1}
                        tries += self._try(candidate, moved, proposer)
            best = min(tries, key=lambda c: c.step_s or 0.0, default=candidate)
            # A gain that no measurement could show is not worth a plan that looks arbitrary.
            if best.step_s is None or best.step_s > simulation.step_s * (1 - 1e-6):
                return candidate
            candidate = best
        return candidate

    def _try(self, candidate: Candidate, shares: Mapping[str, int], proposer: Proposer) -> list[Candidate]:
        try:
            return [self._play(proposer.of_shares(candidate.name, candidate.kind, shares))]
        except InfeasibleError:
            return []  # a fixed number of micro-batches bounds the share of a device


def _serves(kind: str, strategy: Strategy, proposals: int) -> bool:
    """Whether a proposal of that kind is an answer to what was asked. With one device there is one proposal, and it answers all."""
    return strategy == "auto" or kind == strategy or proposals == 1


def _choose(candidates: Sequence[Candidate], strategy: Strategy) -> Candidate:
    """The fastest of those that serve; of equals the one that leaves out fewest devices, then the first. Raises InfeasibleError."""
    serving = [c for c in candidates if _serves(c.kind, strategy, len(candidates))]
    possible = [c for c in serving if c.step_s is not None]
    if not possible:
        raise InfeasibleError(
            f"no plan with strategy {strategy!r}: " + "; ".join(f"{c.name}: {c.why_not}" for c in serving)
        )
    return min(possible, key=lambda c: (c.step_s or 0.0, len(c.left_out)))
