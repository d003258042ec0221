"""Lives at random: a model, a plan, an optimizer, and a script that changes things between steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import heterodyne as hd
from life import dense, sequences
from life.optimizers import OPTIMIZERS
from life.script import SAMPLES, SCRIPT, Line, number_of
from life.subject import RUN_WHOLE, WHOLE, Change, Subject

__all__ = ["ALONE", "KINDS", "OF_OPTIMIZER", "RESUMED", "SUBJECTS", "Life", "changes_of", "draw"]

SUBJECTS = {subject.name: subject for subject in (*dense.SUBJECTS, *sequences.SUBJECTS)}

AVERAGE = (
    "with torch.no_grad(){0}:\n"
    "    for name, tensor in model.named_parameters():\n"
    "        kept.setdefault(name, torch.zeros(tensor.shape)).mul_(0.8).add_(tensor, alpha=0.2)\n"
    "note([average.clone() for average in kept.values()])"
)
PUT_BACK = (
    "with torch.no_grad():\n    for name, tensor in model.named_parameters():\n        tensor.copy_(0.9 * tensor)"
)
SIZES = ("1", "3", "5", "7", "11")

OF_ALL = (
    Change("evaluate", ("evaluat",), "note(trainer.evaluate(batch({}, seed=50)))", SIZES),
    Change("validate", ("validat", "evaluat"), "note(trainer.validate([batch({}, seed=51)])['loss'])", SIZES),
    Change("average by hand", ("*",), AVERAGE.format("")),
    Change("average in whole_weights()", ("*",), AVERAGE.format(", whole_weights()")),
    Change("all parameters in place", ("*",), PUT_BACK),
    Change("state kept", ("state",), "state = copy.deepcopy(trainer.state_dict())"),
    Change("state loaded back", ("state",), "trainer.load_state_dict(state)"),
)
BY_SAMPLE = Change(
    "validate", ("validat", "evaluat"), "note(trainer.validate([batch(4, seed=52), batch({}, seed=53)])['loss'])", SIZES
)
PREDICT = Change("predict", ("predict",), "note(trainer.predict(batch({}, seed=54)))", SIZES)


def _option(kind: str, key: str, *values: str) -> Change:
    return Change(kind, (key,), f"for group in optimizer.param_groups: group[{key!r}] = {{}}", values, alone=True)


SCHEDULER = Change(
    "scheduler",
    ("scheduler", "lr"),
    "after_step.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, {}).step)",
    ("1.0", "0.7", "0.9"),
)
DECAY = _option("weight decay changed", "weight_decay", "0.0", "0.1", "0.01")
MODES = "optimizer.eval(); note(trainer.evaluate(batch({}, seed=55))); optimizer.train()"
OF_OPTIMIZER = {
    "sgd": (
        _option("rate changed", "lr", "0.05", "0.02", "0.1"),
        _option("momentum changed", "momentum", "0.9", "0.5", "0.0"),
        SCHEDULER,
        DECAY,
    ),
    "adamw": (
        _option("rate changed", "lr", "0.01", "0.003", "0.02"),
        _option("betas changed", "betas", "(0.9, 0.999)", "(0.8, 0.95)"),
        SCHEDULER,
        DECAY,
    ),
    "adagrad": (_option("rate changed", "lr", "0.02", "0.01", "0.05"), SCHEDULER, DECAY),
    "schedule-free": (
        _option("rate changed", "lr", "0.05", "0.02"),
        Change("optimizer with modes", ("eval", "mode", "*"), MODES, SIZES),
    ),
}
NEEDS = {"hooks removed": "hook on a part", "state loaded back": "state kept"}
"""What only makes sense after another change."""
FORBIDS = {"state loaded back": {"part replaced"}, "part replaced": {"state kept"}}
"""What has no place after another change: the state of an optimizer names weights by their place, so that of a weight that is gone would
go to the one in its place.
"""
OF_WEIGHTS = frozenset({
    "all parameters in place", "average by hand", "buffer in place", "parameter in place", "parameter rebound by .data", "teacher moved",
})  # fmt: skip
"""What uses weights, which is refused in that line where not every rank holds them. Most scripts have heard so, and ask for all weights."""
HEARD = 0.75
FEWEST, MOST = 6, 20
WHOLE_WEIGHTS = hasattr(hd.Distributed, "whole_weights")
"""Whether trainers have this method, which shows all weights under plans that cut the model."""

ALONE, RESUMED, SHAPES = "on one rank alone", "resumed under another plan", "other shapes"
_OF_SUBJECTS = [change for subject in SUBJECTS.values() for change in subject.changes]
_OF_OPTIMIZERS = [change for changes in OF_OPTIMIZER.values() for change in changes]
KINDS = (
    *dict.fromkeys(change.kind for change in (*OF_ALL, PREDICT, *_OF_OPTIMIZERS, *_OF_SUBJECTS)),
    SHAPES,
    RESUMED,
    ALONE,
)


@dataclass(frozen=True)
class Life:
    """``parts``: under which plan the lines of each part of the life run; the second one goes on from a checkpoint of the first."""

    subject: str
    optimizer: str
    parts: tuple[tuple[str, tuple[Line, ...]], ...]

    def events(self) -> list[str]:
        """The kinds of its changes, in their order."""
        return [line.kind for _, lines in self.parts for line in lines if line.kind != "step"]

    def script(self) -> str:
        """The life as a person would write it."""
        subject = SUBJECTS[self.subject]
        text = [f"# {self.subject}: {inspect.getsource(type(subject.made()[0]))}"]
        for number, (plan, lines) in enumerate(self.parts):
            text.append(f"# plan: {plan}; optimizer: {self.optimizer}")
            text.append("trainer = hd.distribute(model, batch(...), loss=criterion, optimizer=..., plan=...)")
            text += ["trainer.load_checkpoint(folder)"] * (number > 0)
            for place, line in enumerate(lines):
                if not line.line:
                    shape = "".join(f", {name}={value}" for name, value in line.shape)
                    text.append(f"trainer.step(batch({SAMPLES}, seed={line.step}{shape}))")
                    continue
                text.append(f"# {SCRIPT}:{number_of(place)}: {line.kind}")
                indent = "" if line.rank is None else "    "
                text += [f"if trainer.rank == {line.rank}:"] * bool(indent)
                text += [indent + each for each in line.line.splitlines()]
            text += ["trainer.save_checkpoint(folder)"] * (number + 1 < len(self.parts))
        return "\n".join(text)


def draw(
    random: Random,
    *,
    kinds: Sequence[str] = KINDS,
    subjects: Sequence[str] = tuple(SUBJECTS),
    plans: Sequence[str] = (),
) -> Life:
    """A life with changes of these kinds alone, one at least if any of these subjects has one."""
    able = [SUBJECTS[name] for name in subjects if _plans(SUBJECTS[name], plans)]
    subject = random.choice([one for one in able if any(c.kind in kinds for c in one.changes)] or able)
    optimizer = random.choice(sorted(OPTIMIZERS))
    changes = [change for change in changes_of(subject, optimizer) if change.kind in kinds]
    steps = random.randint(FEWEST, MOST)
    plan = random.choice(_plans(subject, plans))
    if ALONE in kinds and plan in RUN_WHOLE and random.random() < (0.1 if len(kinds) > 1 else 1.0):
        return Life(subject.name, optimizer, ((plan, tuple(_with_one_alone(random, subject, optimizer, plan, steps))),))
    drawn = _drawn(random, changes, steps)
    shaped = {}
    if SHAPES in kinds and subject.shapes and random.random() < 0.5:
        shaped = {step: random.choice(subject.shapes) for step in range(2, steps) if random.random() < 0.3}
    if plan not in WHOLE:
        drawn = [_with_whole_weights(line) if random.random() < HEARD else line for line in drawn]
    lines = tuple(_lines(drawn, steps, shaped))
    if RESUMED not in kinds or random.random() < (0.85 if len(kinds) > 1 else 0.0):
        return Life(subject.name, optimizer, ((plan, lines),))
    middle = random.randint(2, steps - 2)
    other = random.choice([name for name in _plans(subject, plans) if plan not in WHOLE or name in WHOLE] or [plan])
    first = tuple(line for line in lines if line.step < middle and line.kind != "part replaced")  # see FORBIDS
    # The script of the second part begins anew: what only the first one had made is not in its sight.
    rest = tuple(line for line in lines if line.step >= middle and line.kind not in NEEDS)
    resumed = Line(middle, RESUMED, ("checkpoint",), "pass")
    return Life(subject.name, optimizer, ((plan, first), (other, (resumed, *rest))))


def _plans(subject: Subject, wanted: Sequence[str]) -> list[str]:
    return [plan for plan in subject.plans if plan in wanted or not wanted]


def changes_of(subject: Subject, optimizer: str) -> Iterator[Change]:
    yield from subject.changes
    yield from (change for change in OF_ALL if change.kind != "average in whole_weights()" or WHOLE_WEIGHTS)
    yield from OF_OPTIMIZER[optimizer]
    if subject.by_sample:
        yield BY_SAMPLE
    if subject.outputs:
        yield PREDICT


def _drawn(random: Random, changes: Sequence[Change], steps: int) -> list[Line]:
    """Two to six changes, of which each kind is as likely."""
    kinds = sorted({change.kind for change in changes})
    found: list[Line] = []
    for step in sorted(random.randint(1, steps - 1) for _ in range(random.randint(2, 6) if kinds else 0)):
        kind = random.choice(kinds)
        change = random.choice([change for change in changes if change.kind == kind])
        before = {line.kind for line in found}
        if NEEDS.get(kind) in (None, *before) and not FORBIDS.get(kind, set()) & before:
            found.append(Line(step, change.kind, change.names, _written(random, change)))
    return found


def _written(random: Random, change: Change, *, other: bool = False) -> str:
    """``other``: with another value than the first, so that it changes something."""
    if not change.values:
        return change.line
    return change.line.format(random.choice(change.values[1:] if other else change.values))


def _with_whole_weights(line: Line) -> Line:
    if line.kind not in OF_WEIGHTS or "whole_weights" in line.line:
        return line
    indented = "\n".join(f"    {each}" for each in line.line.splitlines())
    return replace(line, line=f"with whole_weights():\n{indented}")


def _with_one_alone(random: Random, subject: Subject, optimizer: str, plan: str, steps: int) -> Iterator[Line]:
    alone = [change for change in changes_of(subject, optimizer) if change.alone]
    change, step = random.choice(alone), random.randint(1, steps - 1)
    rank = random.randrange(3 if plan == "data 3" else 2)
    line = Line(step, ALONE, ("rank 0", "rank 1", "rank 2", "ranks"), _written(random, change, other=True), rank)
    yield from _lines([line], steps, {})


def _lines(drawn: Sequence[Line], steps: int, shaped: dict[int, object]) -> Iterator[Line]:
    for step in range(steps):
        yield from (line for line in drawn if line.step == step)
        shape = tuple(dict(shaped[step]).items()) if step in shaped else ()
        yield Line(step, SHAPES if shape else "step", ("shape", "length", "size"), shape=shape)
