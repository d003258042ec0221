"""The result of the device search: the plan, the other candidates, and the data for explaining them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Strategy
from heterodyne.plan.plan import Plan
from heterodyne.sim.run import Simulation

__all__ = [
    "CUTTING_PAYS",
    "FOLDING_PAYS",
    "HOPS_PAY",
    "IN_TURNS_PAYS",
    "STATE_ELSEWHERE_PAYS",
    "Candidate",
    "Kind",
    "Planned",
    "Rehearsed",
    "identity",
    "serves",
]

Kind = Literal[
    "balanced",
    "equal",
    "fastest",
    "fewer",
    "pipeline",
    "replicas",
    "even",
    "split",
    "context",
    "marked",
    "given",
]
STATE_ELSEWHERE_PAYS = 0.95
"""Sharded state, or state on hosts, is chosen only if so much faster: what is gathered or copied hides behind nothing."""

CUTTING_PAYS = 0.95
"""A model is cut only if that makes a step so much faster than whole models beside each other: what stages cost on top of their
computation (waits that add up, messages that a processor has to copy) is known less well than what whole models cost.
"""

FOLDING_PAYS = 0.92
"""Several stages a place are chosen only if so much faster: their passes are short and each waits for another, so what holds up one
device for a moment (a quota's period, a neighbour on the same processor) holds up all, which no prediction counts.
"""

IN_TURNS_PAYS = 0.92
"""Halves in turns are chosen only if so much faster: what hides behind computing also takes time from it where the same processor copies
messages, and how much is known less well than a wait is.
"""

HOPS_PAY = 0.9
"""Tokens go to experts once to each host only if the stage is so much faster: behind each of the two hops all members of a host wait for
the last one of them, so what holds up one for a moment holds up all, which no prediction counts.
"""


_OF_DATA = ("balanced", "equal", "fastest", "fewer")
_OF_PIPELINES = ("pipeline", "replicas", "even")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """The measured step of a plan that was run. ``seconds``: per step; ``as_fast``: not distinguishable from the fastest."""

    seconds: float
    as_fast: bool = True


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way that was weighed. ``plan`` and ``simulation`` are None if it cannot be, and ``why_not`` says why.

    ``left_out``: devices that could take part and have no share in it. ``rehearsed``: if the plan was run to see.
    ``short_of_host``: what it lacks is memory of hosts.
    """

    name: str
    kind: Kind
    plan: Plan | None = None
    simulation: Simulation | None = None
    left_out: tuple[str, ...] = ()
    why_not: str = ""
    rehearsed: Rehearsed | None = None
    short_of_host: bool = False

    @property
    def rehearsed_s(self) -> float | None:
        """Seconds of a step, if the plan was run to see."""
        return None if self.rehearsed is None else self.rehearsed.seconds

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step."""
        return None if self.simulation is None else self.simulation.step_s

    @property
    def weighed_s(self) -> float:
        """Predicted seconds with the uncertainty of the prediction added: candidates are compared by it."""
        if self.step_s is None:
            return float("inf")
        doubts = (
            CUTTING_PAYS if self.kind in (*_OF_PIPELINES, "split", "context") else 1,
            FOLDING_PAYS if self._is_folded else 1,
            IN_TURNS_PAYS if self._in_turns else 1,
            STATE_ELSEWHERE_PAYS if self._has_state_elsewhere else 1,
        )
        return self.step_s / prod(doubts)

    @property
    def _has_state_elsewhere(self) -> bool:
        """Sharded over devices, or on hosts."""
        plan = self.plan
        return plan is not None and (plan.zero > 0 or any(s.offload for p in plan.pipelines for s in p.stages))

    @property
    def _is_folded(self) -> bool:
        return self.plan is not None and any(len(p.places) < len(p.stages) for p in self.plan.pipelines)

    @property
    def _in_turns(self) -> bool:
        return self.plan is not None and any(s.overlap for p in self.plan.pipelines for s in p.stages)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The outcome of a search.

    Args:
        plan: the chosen one, with its prediction and its reason.
        chosen: the candidate that it came from; one of `candidates`.
        candidates: everything that was weighed, in the order in which it was.
        strategy: what was asked for.
        graph, cluster: what it was planned for.
        rates: samples/s of each device computing for itself (see `search.predict.own_rates`).
        compute_s: seconds of forward and backward of each device in the plan, of its share of the batch and of the model.
        unfit: for each device that cannot hold the model and has no part in the plan, why, with what would help.
    """

    plan: Plan
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    strategy: Strategy
    graph: ModelGraph
    cluster: Cluster
    rates: Mapping[str, float]
    compute_s: Mapping[str, float]
    unfit: Mapping[str, str]

    @property
    def simulation(self) -> Simulation:
        """The chosen plan as played: ``.timeline(devices)`` gives what should happen."""
        assert self.chosen.simulation is not None  # only a candidate that can be is chosen
        return self.chosen.simulation


def identity(plan: Plan) -> str:
    """Equal for plans that run the same, whatever their prediction and reason."""
    return plan.model_copy(update={"reason": "", "predicted": None}).dump()


def serves(kind: Kind, strategy: Strategy, *, only: bool = False) -> bool:
    """Whether a plan of that kind answers the strategy; the ``only`` way of data parallelism answers all of that."""
    if strategy in ("data", "pipeline"):
        return kind in (_OF_DATA if strategy == "data" else _OF_PIPELINES)
    if strategy in ("split", "context"):
        return kind in (strategy, "marked")
    return strategy == "auto" or kind == strategy or (only and kind in _OF_DATA)
