"""Data parallelism: every device that can hold the model runs it whole, for its share of the batch.

A step in which every device waits for the last reduction lasts as long as the slowest device's forward, backward and update, and
what of the reductions does not hide behind them. So shares are balanced on measured time curves (`search.balance`), for all
devices and for subsets of them; each proposal is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.job import Strategy
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Candidate, serves
from heterodyne.search.predict import plan_of, predict, stage_of
from heterodyne.search.proposals import Proposal, Proposer
from heterodyne.sim.run import Simulation
from heterodyne.units import format_seconds

__all__ = ["DataParallel"]

_MOST_REFINEMENTS = 16
_SHOWS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """What is to be spread, over whom: ``runs`` of the devices that can hold the model."""

    model: CostModel
    runs: Mapping[str, MicroBatchChoice]
    samples: int

    def candidates(self, strategy: Strategy) -> tuple[Candidate, ...]:
        """Everything weighed. Under a fixed count of micro-batches, of the smallest count with which what is asked for can be."""
        if not self.runs:
            return ()
        able = Capabilities(self.model.graph)
        if not able.allow("several_micro_batches", "early_backward"):
            return self._weigh(self._proposer(1))  # each replica compares all its samples at once
        if able.allow("unequal_counts"):
            return self._weigh(self._proposer(None))
        reach = sum(run.largest for run in self.runs.values())
        for count in range(max(1, -(-self.samples // reach)), self.samples + 1):
            proposer = self._proposer(count)
            proposals = proposer.all()
            if any(serves(p.kind, strategy, only=len(proposals) == 1) and p.micro_batches for p in proposals):
                return self._weigh(proposer)
        raise InfeasibleError(f"no number of micro-batches serves {self.samples} samples on {', '.join(self.runs)}")

    def _proposer(self, count: int | None) -> Proposer:
        return Proposer(cluster=self.model.cluster, runs=self.runs, samples=self.samples, count=count)

    def _weigh(self, proposer: Proposer) -> tuple[Candidate, ...]:
        proposals: list[Proposal] = []
        seen: set[tuple[tuple[str, object], ...]] = set()
        for proposal in proposer.all():
            key = tuple(sorted((d, m.sizes) for d, m in proposal.micro_batches.items()))
            if key and key in seen and proposal.kind == "fewer":
                continue  # the balance of more devices already left the same ones without a share
            seen.add(key)
            proposals.append(proposal)
        least = {proposal.name: self._least_s(proposal) for proposal in proposals}
        candidates = self._played(proposals, least)
        # All devices, and the best subset: refining those that are far behind would not bring them to the front.
        best_s = min((c.weighed_s for c in candidates), default=inf)
        for kind in ("balanced", "fewer"):
            best = min((c for c in candidates if c.kind == kind), key=lambda c: c.weighed_s, default=None)
            if best is not None and best.step_s is not None:
                refined = self._refine(best, proposer, least[best.name], best_s)
                candidates[candidates.index(best)] = refined
                best_s = min(best_s, refined.weighed_s)
        return tuple(candidates)

    def _played(self, proposals: Sequence[Proposal], least_s: Mapping[str, float]) -> list[Candidate]:
        """All of them, but subsets that cannot be faster than one that was played: to play one takes a while, and there are many."""
        played: dict[str, Candidate] = {}
        best_s, best_subset_s = inf, inf
        for proposal in sorted(proposals, key=lambda p: (p.kind == "fewer", least_s[p.name])):
            if proposal.kind == "fewer" and best_subset_s < inf and least_s[proposal.name] >= best_s:
                why = f"takes at least {format_seconds(least_s[proposal.name])} a step"
                played[proposal.name] = Candidate(name=proposal.name, kind="fewer", why_not=why)
                continue
            own = played[proposal.name] = self._play(proposal)
            best_s = min(best_s, own.step_s or inf)
            if proposal.kind == "fewer":
                best_subset_s = min(best_subset_s, own.step_s or inf)
        return [played[proposal.name] for proposal in proposals]

    def _least_s(self, proposal: Proposal) -> float:
        """Seconds that no step is shorter than: the slowest device computes, or all gradients are reduced. 0 for what cannot be."""
        shares = proposal.micro_batches
        compute_s = max((self.runs[d].compute_s(own) + self.runs[d].fixed_s for d, own in shares.items()), default=0.0)
        reduce_s = self.model.collectives.all_reduce(tuple(shares))(self.model.graph.trainable_bytes)
        return max(compute_s, reduce_s)

    def _play(self, proposal: Proposal) -> Candidate:
        if not proposal.micro_batches:
            return Candidate(name=proposal.name, kind=proposal.kind, why_not=proposal.why_not)
        whole = (0, len(self.model.graph.ops))
        pipelines = tuple(
            Pipeline(
                micro_batches=micro_batches,
                stages=(run.stage or stage_of(whole, (device,)),),
            )
            for device, micro_batches in proposal.micro_batches.items()
            for run in (self.runs[device],)
        )
        try:
            made, simulation = predict(self.model, plan_of(self.model, self.samples, pipelines), self.runs)
        except PlanError as error:  # devices that recompute unlike blocks, where that is mathematics
            return Candidate(name=proposal.name, kind=proposal.kind, why_not=str(error))
        left_out = tuple(device for device in self.runs if device not in proposal.micro_batches)
        return Candidate(name=proposal.name, kind=proposal.kind, plan=made, simulation=simulation, left_out=left_out)

    def _refine(self, candidate: Candidate, proposer: Proposer, least_s: float, best_s: float) -> Candidate:
        """Move single samples from those who wait least to those who wait most, as long as the simulated step gets shorter, and until no
        shares of these devices can do better than what is known: ``least_s`` is their bound, ``best_s`` the fastest of all.

        The balance sees compute alone. Which reductions hide behind whose last backward shows only when the program is played.
        """
        for _ in range(_MOST_REFINEMENTS):
            made, simulation = candidate.plan, candidate.simulation
            if made is None or simulation is None or len(made.pipelines) < 2:
                return candidate
            # A gain that no measurement could show is not worth a plan that looks arbitrary.
            below_s = simulation.step_s * (1 - _SHOWS)
            if least_s >= min(below_s, best_s * (1 - _SHOWS)):
                return candidate
            tries = [self._play(moved) for moved in self._moves(made, simulation, candidate, proposer, below_s)]
            best = min(tries, key=lambda c: c.weighed_s, default=candidate)
            if best.weighed_s > below_s:
                return candidate
            candidate = best
        return candidate

    def _moves(
        self, made: Plan, simulation: Simulation, candidate: Candidate, proposer: Proposer, below_s: float
    ) -> Iterator[Proposal]:
        """The same with a sample moved, where that may take less than ``below_s``."""
        shares = {p.stages[0].devices[0]: p.micro_batches.samples for p in made.pipelines}
        by_wait = sorted(shares, key=lambda device: simulation.wait_s[self.model.cluster.rank(device)])
        for donor in by_wait[:2]:
            for taker in by_wait[:-4:-1]:
                if donor == taker or shares[donor] <= 1:
                    continue
                moved = {**shares, donor: shares[donor] - 1, taker: shares[taker] + 1}
                try:
                    proposal = proposer.of_shares(candidate.name, candidate.kind, moved)
                except InfeasibleError:
                    continue  # a fixed number of micro-batches bounds the share of a device
                if self._least_s(proposal) < below_s:
                    yield proposal
