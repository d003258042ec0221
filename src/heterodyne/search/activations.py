"""What a device does with activations for which it has no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from heterodyne.plan.plan import Stage

__all__ = ["ALL_KEPT", "Activations"]


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Of a stage that is the whole model.

    Args:
        recompute: blocks whose activations are recomputed; ``keep``: ops in them that keep their outputs.
        hosted: blocks whose activations are offloaded to the host.
    """

    recompute: tuple[int, ...] = ()
    keep: tuple[str, ...] = ()
    hosted: tuple[int, ...] = ()

    @classmethod
    def of(cls, stage: Stage) -> Activations:
        return cls(recompute=stage.recompute, keep=stage.keep, hosted=stage.offload_activations)

    def on(self, stage: Stage) -> Stage:
        """The stage with them."""
        made = {"recompute": self.recompute, "keep": self.keep, "offload_activations": self.hosted}
        return stage.model_copy(update=made)

    def __bool__(self) -> bool:
        """Whether anything is recomputed or offloaded."""
        return bool(self.recompute or self.hosted)


ALL_KEPT: Final = Activations()
