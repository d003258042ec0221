"""What a rank runs while the model is as it was captured, and the switch to something else when the script has changed it.

A graph, and what is known of the loss, hold for one state of the model's Python side (`ReadState`). When that is another before a step,
the model is captured as it is now, under the same plan; states that come back find what was made for them. All ranks switch together:
each sends a digest of what it has seen change, and a change on one rank alone ends the step before its update, on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor, nn

from heterodyne.errors import HeterodyneError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.module_outputs import OutputHook
from heterodyne.plan.lower import lower_again
from heterodyne.runtime.assignment import Assignment
from heterodyne.runtime.batch_work import BatchWork
from heterodyne.runtime.exact.later_batches import LaterBatches
from heterodyne.runtime.liveness.watchdog import Watchdog
from heterodyne.runtime.recapture.compared import Compared, disagreement
from heterodyne.runtime.recapture.read_state import Change, ReadState, State
from heterodyne.runtime.recapture.replaced_buffers import ReplacedBuffers
from heterodyne.runtime.recapture.script_writes import ScriptWrites
from heterodyne.runtime.stages.stage_builder import StagePrograms
from heterodyne.runtime.weights.between_steps import Sample, require_alike
from heterodyne.units import format_seconds

__all__ = ["Again", "Capture", "Step", "Variant", "Variants"]

T = TypeVar("T")

MOST = 8
"""Of so many states of the model what runs is kept."""
MOST_IN_A_ROW = 4
"""The model is captured for so many steps in a row, if something is another before each."""
_OF_ALL_MODULES = "torch.nn.modules.module._global"
_MOST_NAMES = 3
_OR_WHOLE = ", or take a plan in which each device runs the whole model (plan='data')"


class Numbers(Protocol):
    """Attributes of the model that are inputs of its graph, which holds for several values of them."""

    @property
    def names(self) -> Sequence[str]: ...

    def hold(self, values: Mapping[str, int | float]) -> bool:
        """Return whether the graph holds for these values."""

    def tensors(self, values: Mapping[str, int | float]) -> Mapping[str, Tensor]:
        """Return what the graph is given beside the batch."""


class Left(Protocol):
    """A place that forward sets."""

    def guard(self, model: nn.Module) -> None:
        """Let the script use nothing of what depends on a batch."""

    def follow(self, model: nn.Module) -> None:
        """Set what does not, as forward does."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What was captured of a model in one state. ``programs``, ``numbers``: None where there is no graph, or are no such numbers; ``left``:
    places that forward sets in the model and around it."""

    graph: ModelGraph
    loss_count: LossCount
    programs: StagePrograms | None
    numbers: Numbers | None = None
    left: Sequence[Left] = ()

    def guard(self, model: nn.Module) -> None:
        """Let the script use nothing that forward sets: its values are those of a part of the batch, or of an earlier one."""
        for left in self.left:
            left.guard(model)

    def follow(self, model: nn.Module) -> None:
        """Set numbers that forward sets to what they are in every step."""
        for left in self.left:
            left.follow(model)

    def holds(self, captured: State, now: State, *, modes: bool) -> bool:
        """Return whether it is that of the model in the state ``now``, too; it was made in the state ``captured``."""
        changes = captured.changes(now, modes=modes)
        if not changes or self.numbers is None:
            return not changes
        values = now.numbers(self.numbers.names)
        return {change.name for change in changes} <= {f"'{name}'" for name in values} and self.numbers.hold(values)

    def tensors(self, now: State) -> Mapping[str, Tensor]:
        """Return the numbers that the graph is given in that state."""
        return {} if self.numbers is None else self.numbers.tensors(now.numbers(self.numbers.names))


Again: TypeAlias = Callable[[nn.Module, Mapping[str, Tensor], Sequence[str]], Capture]
"""Captures a model as it is now, given by name the buffers, whole, that the script has put in the place of others, and the names of
attributes that are to be inputs of the graph if it can have them so. Raises CaptureError."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """What runs in one state. ``later``: compares parts of a batch with the whole; None where pieces of a graph run."""

    capture: Capture
    assignment: Assignment
    batches: BatchWork
    later: LaterBatches | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step runs.

    Args:
        numbers: that it is given beside the batch.
        changed: something is another than before, on all ranks.
        agreed: whether all ranks run the same model; to be asked before the update. Collective. Raises PlanError if ranks hold other values
            of one weight.
        suspected: whether any rank has suspected that something is slower.
    """

    variant: Variant
    numbers: Mapping[str, Tensor]
    changed: bool
    agreed: Callable[[], bool]
    suspected: Callable[[], bool]


@dataclass(eq=False)
class _Seen:
    """Of one mode (training, or evaluation) what was read last, what runs in that state, and all that is another than at the start."""

    read: ReadState
    variant: Variant
    changes: list[Change] = field(default_factory=list)
    replaced: int = 0


class Variants:
    """Of one rank. Every method is called by all ranks together.

    Args:
        module: the user's model, of which this rank holds a part.
        first: what runs in the state that it is in.
        make: what runs of a capture under a plan. Collective.
        again: captures the module as it is now; None: what changes is refused where pieces of a graph run.
        writes: of the script, to weights and to options of the optimizer.
        sample: a few values of what this rank holds, to compare with other ranks.
        replaced: the buffers that the script has put in the place of others.
        switched: is called with what begins to run in training, when that is something else.
        watch: is informed of a capture, which takes long.
        say: takes a line for people.
    """

    def __init__(
        self,
        module: nn.Module,
        first: Variant,
        *,
        make: Callable[[Capture, Assignment], Variant],
        again: Again | None,
        writes: ScriptWrites,
        sample: Callable[[], Sample],
        replaced: ReplacedBuffers,
        switched: Callable[[Variant], None],
        watch: Watchdog | None,
        say: Callable[[str], None],
    ) -> None:
        self._module = module
        self._make = make
        self._again = again
        self.writes = writes
        self._sample = sample
        self._replaced = replaced
        self._switched = switched
        self._watch = watch
        self._say = say
        self._communicator = first.assignment.communicator
        self._exchanges = bool(first.capture.graph.batch_statistics) and first.later is not None
        self._trains = bool(first.assignment.role.micro_batches.samples)
        self.first = first
        self._runs = first.later is not None
        self._training = _Seen(ReadState(module, runs=self._runs), self.first)
        self._evaluating: _Seen | None = None
        self._start = self._training.read.state
        self._parameters = self._training.read.parameters
        self._dtypes = {name: parameter.dtype for name, parameter in self._parameters.items()}
        self._known: list[tuple[State, Variant]] = [(self._start, self.first)]
        self._numbers: dict[str, None] = {}  # attributes that have changed, in order
        self._unsure = True  # whether the latest step itself may have changed what is read
        self._in_a_row = 0  # steps for each of which the model was captured, because of what is in `_row`
        self._row: frozenset[str] = frozenset()

    @property
    def running(self) -> Variant:
        """Return what ran in the latest step."""
        return self._training.variant

    def leave(self) -> None:
        """A step has ended: what changed in it is not the script's doing, and from here on whatever changes anything is."""
        self.running.capture.guard(self._module)
        self.writes.leave()
        read, before = self._training.read, self._training.read.state
        read.leave()
        self._unsure = read.state is not before
        if self._runs:  # a forward has set what it sets
            return
        if read.state is not before:  # what a forward would have set is guarded: that changes nothing of what runs
            self._known.append((read.state, self.running))
        self.running.capture.follow(self._module)  # which is seen before the next step, whose forward may read it

    def are_same(self) -> bool:
        """Return whether modules, parameters and all that forward and loss read are what they were at the last look in training."""
        return not self._unsure and self._training.read.is_same()

    def step(self, number: int, *, same: bool | None = None, suspects: bool = False) -> Step:
        """Return what the next step runs. Raises PlanError, on all ranks, for a change that cannot be followed.

        ``same``: what `are_same` has just said, if it was asked.
        ``suspects``: this rank suspects that something is slower, which all hear with the rest.
        """
        seen = self._training
        before, changed = seen.read.state, self._look(seen, same)
        look = self.writes.find(number)
        between = self.writes.found if self._trains else None
        compared = Compared(self._communicator, seen.changes, between, self.writes.state, look=look, suspects=suspects)
        if self._exchanges and not compared.equal():  # before a forward in which ranks wait for each other
            raise self.disagreement()
        if changed and compared.equal():
            self._switch(seen, before)
        elif changed:  # what runs until the step is refused is what ran before
            self._replaced.undo()
        self._row = self._row if changed else frozenset()

        def agreed() -> bool:
            if compared.equal() and compared.look():
                require_alike(self._communicator.all_gather_object(self._sample()), number)
            return compared.equal()

        numbers = seen.variant.capture.tensors(seen.read.state)
        followed = changed and compared.equal()
        return Step(
            variant=seen.variant, numbers=numbers, changed=followed, agreed=agreed, suspected=compared.suspected
        )

    def _switch(self, seen: _Seen, before: State) -> None:
        running = seen.variant
        self._follow(seen, before, modes=True)
        if seen.variant is not running:
            self._switched(seen.variant)

    def evaluation(self) -> tuple[Variant, Mapping[str, Tensor]]:
        """Return what runs in evaluation, and the numbers that it is given; the module is in that mode. Raises PlanError as `step` does."""
        before, seen = self._start, self._evaluating
        if seen is None:
            self._replaced.take_over()
            seen = self._evaluating = _Seen(
                ReadState(self._module, runs=self._runs), self.first, replaced=self._replaced.count
            )
            seen.read.state = seen.read.state.also(self._replaced.shapes())
            seen.changes = self._all_changes(seen.read.state)
            changed = True
        else:
            before, changed = seen.read.state, self._look(seen)
        if not Compared(self._communicator, seen.changes).equal():
            raise disagreement(self._communicator, seen.changes)
        if changed:
            self._follow(seen, before, modes=False)
        return seen.variant, seen.variant.capture.tensors(seen.read.state)

    def disagreement(self) -> PlanError:
        """Return what to say of changes before the latest step that not all ranks have made. Collective."""
        return disagreement(
            self._communicator, [*self._training.changes, *self.writes.found, *(self.writes.state or ())]
        )

    def _look(self, seen: _Seen, same: bool | None = None) -> bool:
        """Return whether anything is another than at the last look in this mode."""
        if (seen.read.is_same() if same is None else same) and seen.replaced == self._replaced.count:
            return False
        self._replaced.take_over()
        replaced, seen.replaced = seen.replaced, self._replaced.count
        before, parameters = seen.read.state, seen.read.parameters
        state = seen.read.state = seen.read.take().also(self._replaced.shapes())
        same = parameters.keys() == seen.read.parameters.keys() and all(
            map(is_, parameters.values(), seen.read.parameters.values())
        )
        if replaced == seen.replaced and same and not before.changes(state):
            return False  # other objects of the same values
        seen.changes = self._all_changes(state)
        return True

    def _all_changes(self, state: State) -> list[Change]:
        return [*self._start.changes(state), *self._replaced.changes]

    def _follow(self, seen: _Seen, before: State, *, modes: bool) -> None:
        """Let what runs be that of the state as it is now. Raises PlanError or CaptureError, on all ranks if on any."""
        state = seen.read.state
        now = seen.read.parameters
        for name in sorted(self._parameters.keys() | now.keys()):
            parameter, dtype = self._parameters.get(name), self._dtypes.get(name)
            if name not in now:
                raise PlanError(
                    f"{name!r} is not in the model any more, and optimizer, gradients and checkpoints have it. Leave the module "
                    "where it is, and let forward go past it by an attribute (if not self.skips[i]: x = self.blocks[i](x)), or close the "
                    "trainer and distribute the model as it is now"
                )
            if parameter is not now.get(name):
                raise PlanError(
                    f"{name!r} is another parameter than when the model was distributed, which the optimizer does not know. Write into "
                    "the one that is there (with torch.no_grad(): parameter.copy_(value)), or distribute the model again"
                )
            if parameter is not None and parameter.dtype is not dtype:
                raise PlanError(
                    f"{name!r} was {dtype} when the model was distributed and is {parameter.dtype}: gradients and optimizer have that "
                    "type. Change it before, and distribute the model again"
                )
        self._replaced.agreed()
        self.writes.find_weights()
        for known, variant in self._known:
            if variant.capture.holds(known, state, modes=modes):
                seen.variant = variant
                break
        else:
            self._note_row(seen, before.changes(state, modes=modes))
            # Where modules run as they are, parts of each batch are compared with the whole instead, step by step.
            later = seen.variant.later
            if self._again is None and (seen is self._evaluating or later is not None):
                pass  # evaluation runs what was captured in training, and modules run as they are
            elif self._in_a_row <= MOST_IN_A_ROW or later is None or not later.asks:
                self._numbers |= dict.fromkeys(before.numbers_changed(state))
                remedy = self._evaluate_by_hand if seen is self._evaluating else self._change_before
                seen.variant = self._captured(state, before.changes(state, modes=modes), remedy())

    def asked_for(self) -> None:
        """Say that what is another now was asked for by name, and no step after the other needs it."""
        self._in_a_row, self._row = 0, frozenset()

    def _note_row(self, seen: _Seen, changes: Sequence[Change]) -> None:
        if seen is self._training:
            names = frozenset(change.name for change in changes)
            self._in_a_row = self._in_a_row + 1 if names & self._row else 1
            self._row = names

    def _change_before(self) -> str:
        cut = self.first.later is None
        return f"Change it before the model is distributed{_OR_WHOLE if cut else ''}"

    def _evaluate_by_hand(self) -> str:
        return f"Evaluate the whole model (with trainer.whole_weights() as model: model.eval(); model(...)){_OR_WHOLE}"

    def _captured(self, state: State, changes: Sequence[Change], remedy: str) -> Variant:
        said = [str(change) for change in changes if OutputHook.__name__ not in f"{change.before} {change.after}"]
        said += ["other modules of the model are looked into"] if len(said) < len(changes) else []
        words = "; ".join(said[:_MOST_NAMES]) + (" ..." if len(said) > _MOST_NAMES else "")
        if any(_OF_ALL_MODULES in change.name for change in changes):
            raise PlanError(
                f"{words}: a hook of all modules is called with copies where a graph is captured. Register it on the modules that it is "
                "for (module.register_forward_hook), or before the model is distributed"
            )
        if self._in_a_row > MOST_IN_A_ROW:
            raise PlanError(
                f"{words}: it is another before each of {MOST_IN_A_ROW + 1} steps in a row, and for each value the model is "
                "captured again, "
                "which takes seconds. Make it an entry of the batch, or a buffer (register_buffer) that is written to between steps "
                "(in 'with trainer.whole_weights():' under a plan that cuts the model)"
            )
        started_s = time.perf_counter()
        with nullcontext() if self._watch is None else self._watch.phase("capturing the model as it is now"):
            capture, assignment = self._together(partial(self._capture_now, words), words, remedy)
            made = self._make(capture, assignment)
            self._together(made.batches.prepare, words, remedy)
        self._known = [(self._start, self.first), *([(state, made), *self._known[:-1]][: MOST - 1])]
        self._say(f"{words}: captured again in {format_seconds(time.perf_counter() - started_s)}")
        return made

    def _capture_now(self, words: str) -> tuple[Capture, Assignment]:
        first = self.first.assignment
        if self._again is None:
            raise PlanError(f"{words} since the model was captured, and nothing here can capture it again")
        capture = self._again(self._module, self._replaced.whole, list(self._numbers))
        return capture, replace(first, lowered=lower_again(first.lowered, capture.graph, self._replaced.whole.keys()))

    def _together(self, do: Callable[[], T], words: str, remedy: str) -> T:
        """All ranks do it. Raises PlanError, on all of them, for what one of them raises."""
        found: list[T] = []
        try:
            self._communicator.agreement.gather_or_raise(lambda: found.append(do()))
        except HeterodyneError as error:
            raise PlanError(f"{words}, and this plan cannot follow that: {error}\n{remedy}") from error
        return found[0]
