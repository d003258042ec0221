"""The planner: balances shares, weighs alternatives on the simulator, says why it chose."""

from heterodyne.search.alternatives import alternatives, result_of
from heterodyne.search.balance import Balance, balance
from heterodyne.search.explain import ShareRow, paragraph, reason, shares
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Candidate, Planned, Strategy
from heterodyne.search.planner import plan
from heterodyne.search.predict import own_rates, predict
from heterodyne.search.result import AlternativeRow, PlanningResult

__all__ = [
    "AlternativeRow",
    "Balance",
    "Candidate",
    "MicroBatchChoice",
    "Planned",
    "PlanningResult",
    "ShareRow",
    "Strategy",
    "alternatives",
    "balance",
    "own_rates",
    "paragraph",
    "plan",
    "predict",
    "reason",
    "result_of",
    "shares",
]
