"""The Trainer of ``pytorch_lightning``, with its steps run under a plan: as `heterodyne.integrations.lightning`.

The two packages have the same classes twice, and a Trainer takes only strategies of its own.
"""

from __future__ import annotations

from pytorch_lightning.strategies import Strategy

from heterodyne.integrations.lightning.strategy import PlanStrategy

__all__ = ["HeterodyneStrategy"]


class HeterodyneStrategy(PlanStrategy, Strategy):  # type: ignore[misc]  # signatures name the classes of the other package
    """For the Trainer of ``pytorch_lightning``."""
