"""The Trainer of Lightning, with its steps run under a plan. See docs/lightning.md.

    from heterodyne.integrations.lightning import HeterodyneStrategy

    trainer = L.Trainer(strategy=HeterodyneStrategy(), ...)

For scripts that ``import lightning``; those that ``import pytorch_lightning`` take it from `heterodyne.integrations.pytorch_lightning`.
Needs ``pip install heterodyne[lightning]``.
"""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy

from heterodyne.integrations.lightning.strategy import PlanStrategy

__all__ = ["HeterodyneStrategy"]


class HeterodyneStrategy(PlanStrategy, Strategy):
    """For the Trainer of ``lightning``."""
