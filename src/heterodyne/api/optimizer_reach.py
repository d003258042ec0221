"""What plans an optimizer of the user's own leaves: its update may need whole weights, or all of them in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from heterodyne.api.session import Session
from heterodyne.errors import PlanError
from heterodyne.frontend.faults import line_now
from heterodyne.job import OptimizerSection, Reach
from heterodyne.runtime.weights.optimizer import OptimizerFactory
from heterodyne.runtime.weights.optimizer_probe import left_out, reach_of

__all__ = ["OptimizerReach", "reach_everywhere", "reach_of_section"]

_WORDS: Mapping[Reach, str] = {
    "element": "",
    "weight": "needs whole weights, so plans that split layers are left out",
    "model": "needs all weights in one place, so that only data parallelism without sharded state is exact",
}
_UNKNOWN = "so it is not known whether it can update parts of weights by themselves: only data parallelism without sharded state is left"


@dataclass(frozen=True, kw_only=True)
class OptimizerReach:
    """What the update of an element may depend on, in the optimizer called ``name``, which the user's ``line`` asks for.

    ``untried``: why it could not be tried; "" if it was.
    """

    reach: Reach = "element"
    name: str = "the optimizer"
    line: str = ""
    untried: str = ""

    @property
    def words(self) -> str:
        """Return what it needs, as a sentence; "" if it goes with every plan."""
        if self.untried:
            return f"{self.name} could not be tried ({self.untried}), {_UNKNOWN}"
        return f"{self.name} {_WORDS[self.reach]}" if _WORDS[self.reach] else ""

    def refusal(self, of: str) -> PlanError:
        """Return what to raise for a plan or strategy (``of``) that shards what this optimizer must see at once."""
        place = f"{self.line}\n" if self.line else ""
        remedy = _TRIABLE if self.untried else _REMEDY
        return PlanError(f"{place}{of} does not go with this optimizer: {self.words}; {remedy}")


def reach_of_section(section: OptimizerSection) -> OptimizerReach:
    """Return the reach of an optimizer that is asked for by name."""
    return (
        OptimizerReach()
        if section.reach == "element"
        else OptimizerReach(reach=section.reach, name=section.name.capitalize())
    )


def reach_everywhere(
    session: Session, factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter]
) -> OptimizerReach:
    """The reach of an optimizer, tried on every rank and said once, as are the parameters that it leaves out. Collective.

    Raises HeterodyneError for one that no plan can step.
    """
    reach, name, untried = session.together(lambda: reach_of(factory, parameters))
    left = left_out(factory, parameters)
    if left:
        session.say(
            f"warning: optimizer= leaves out {len(left)} of the {len(parameters)} parameters that are trained ({', '.join(left[:3])}"
            f"{', ...' if len(left) > 3 else ''}): they keep their values until a group has them (trainer.optimizer.add_param_group)"
        )
    found = OptimizerReach(reach=reach, name=name, line=line_now(), untried=untried)
    if found.words:
        session.say(found.words)
    return found


_REMEDY = "take AdamW, SGD or another optimizer that updates each element by itself, or leave that strategy out"
_TRIABLE = (
    "let optimizer= make it of the parameters that it is given, whatever their sizes, without looking at the model itself (names come with "
    "a first argument called named_parameters), or leave that strategy out"
)
