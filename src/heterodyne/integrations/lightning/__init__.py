"""The Trainer of Lightning on devices of unlike speed. See docs/lightning.md.

    from heterodyne.integrations.lightning import DDPStrategy, HeterodyneStrategy

    trainer = L.Trainer(strategy=DDPStrategy(), ...)  # any LightningModule, as it is
    trainer = L.Trainer(strategy=HeterodyneStrategy(), ...)  # its steps run under a plan, which may cut the model

For scripts that ``import lightning``; those that ``import pytorch_lightning`` take it from `heterodyne.integrations.pytorch_lightning`.
Needs ``pip install heterodyne[lightning]``.
"""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy as OfLightning
from lightning.pytorch.strategies import Strategy

from heterodyne.integrations.lightning.strategy import PlanStrategy
from heterodyne.integrations.lightning.unequal_ddp import UnequalDDP

__all__ = ["DDPStrategy", "HeterodyneStrategy"]


class DDPStrategy(UnequalDDP, OfLightning):
    """For the Trainer of ``lightning``."""


class HeterodyneStrategy(PlanStrategy, Strategy):
    """For the Trainer of ``lightning``."""
