"""The Trainer of ``pytorch_lightning``, on devices of unlike speed: as `heterodyne.integrations.lightning`.

The two packages have the same classes twice, and a Trainer takes only strategies of its own.
"""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy as OfLightning
from pytorch_lightning.strategies import Strategy

from heterodyne.integrations.lightning.strategy import PlanStrategy
from heterodyne.integrations.lightning.unequal_ddp import UnequalDDP

__all__ = ["DDPStrategy", "HeterodyneStrategy"]


class DDPStrategy(UnequalDDP, OfLightning):  # type: ignore[misc]  # signatures name the classes of the other package
    """For the Trainer of ``pytorch_lightning``."""


class HeterodyneStrategy(PlanStrategy, Strategy):  # type: ignore[misc]  # signatures name the classes of the other package
    """For the Trainer of ``pytorch_lightning``."""
