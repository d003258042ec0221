"""What becomes of the activations of a device that has no room for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from heterodyne.plan.plan import Stage

__all__ = ["ALL_KEPT", "Activations"]


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Of a stage that is the whole model.

    Args:
        recompute: blocks whose activations are computed again; ``keep``: but for what these ops make.
        hosted: blocks whose activations wait on the host.
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
        """Whether anything is not just kept."""
        return bool(self.recompute or self.hosted)


ALL_KEPT: Final = Activations()
