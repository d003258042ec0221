"""What forward leaves in attributes: refused where the next forward reads it, else of no use to the script."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import CaptureError, PlanError
from heterodyne.frontend import capture, trace
from heterodyne.frontend.left_behind import SetByForward

BATCH = {"x": torch.zeros(2, 4)}


class Leaves(nn.Module):
    """A model that does something with what it has, which may be what an earlier forward has left."""

    def __init__(self, then: Callable[[Leaves, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("rates", torch.ones(4))
        self.state: Tensor | None = None
        self.table: dict[object, Tensor] = {}
        self.kept: list[Tensor] = []
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x)).pow(2).mean()


def after_step(model: nn.Module) -> None:
    """What a step does with what forward leaves."""
    for left in trace(model, BATCH).left:
        left.guard(model)
        left.follow(model)


def _recurrent(model: Leaves, y: Tensor) -> Tensor:
    before = model.state
    model.state = y.detach()
    return y if before is None else y + before


def _of_table(model: Leaves, y: Tensor) -> Tensor:
    scaled = y * model.table.get("scale", 1.0)
    model.table["scale"] = y.detach().abs().mean()
    return scaled


def _queued(model: Leaves, y: Tensor) -> Tensor:
    model.kept.append(model.linear.weight.detach().mean())
    return y + sum(model.kept[:-1])


@pytest.mark.parametrize(
    ("then", "name"), [(_recurrent, "state"), (_of_table, r"table\['scale'\]"), (_queued, r"kept\[0\]")]
)
def test_what_the_next_forward_reads_is_refused_by_name(then: Callable[[Leaves, Tensor], Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=f"forward changes ['\"]{name}"):
        capture(Leaves(then), BATCH)


def _cached(model: Leaves, y: Tensor) -> Tensor:
    """Of sizes and buffers alone, as rotary embeddings are."""
    if y.shape[1] not in model.table:
        model.table[y.shape[1]] = torch.arange(y.shape[1]) * model.rates
    return y * model.table[y.shape[1]].cos()


def test_a_cache_of_what_never_changes_may_stay() -> None:
    model = Leaves(_cached)
    after_step(model)
    assert not any(isinstance(value, SetByForward) for value in model.table.values())


def _logged(model: Leaves, y: Tensor) -> Tensor:
    model.state = y.detach().mean()
    model.table["size"] = y.detach().abs().mean()
    model.kept.append(y.detach())
    return y


@pytest.mark.parametrize(
    "use",
    [
        float,
        bool,
        str,
        lambda left: left.item(),
        lambda left: left + 1,
        lambda left: 2 / left,
        lambda left: left > 0,
        lambda left: torch.stack([left]),
        lambda left: torch.ones(2) * left,
        lambda left: f"{left:.3f}",
        lambda left: sum([left]),
    ],
)
def test_what_is_logged_has_no_value_and_says_so(use: Callable[[object], object]) -> None:
    model = Leaves(_logged)
    after_step(model)
    for left, name in ((model.state, "state"), (model.table["size"], "table"), (model.kept, "kept")):
        with pytest.raises(PlanError, match=f"'?{name}.* has no value after a step: forward sets it"):
            use(left)


def test_a_model_with_it_runs_is_copied_and_saved() -> None:
    model = Leaves(_logged)
    after_step(model)
    assert model.state is not None
    torch.save(copy.deepcopy(model).state_dict(), io.BytesIO())
    after_step(model)
    model(torch.ones(2, 4))
    assert float(model.state) == pytest.approx(float(model.linear(torch.ones(2, 4)).mean().detach()))


class Recorder:
    """What users hang to a module to see what goes through it."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None

    def hook(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self.seen.append(output.detach())
        self.last = output.detach().mean()


def test_what_hooks_write_around_the_model_has_no_value_either() -> None:
    model, stats, recorder = Leaves(lambda _, y: y), {"mean": torch.zeros(()), "rows": torch.zeros(())}, Recorder()
    latest: Tensor | None = None

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        nonlocal latest
        stats["mean"] = latest = output.detach().mean()

    model.linear.register_forward_hook(hook)
    model.linear.register_forward_hook(recorder.hook)
    capture(model, BATCH)
    assert latest is None
    assert stats["mean"] == 0
    assert recorder.seen == []
    after_step(model)
    after_step(model)
    assert stats["rows"] == 0
    for left, name in ((stats["mean"], r"stats\['mean'\]"), (latest, "latest"), (recorder.last, "Recorder.last")):
        with pytest.raises(PlanError, match=f"{name}['\"] has no value after a step"):
            float(left)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"Recorder.seen' has no value"):
        len(recorder.seen)
    model(torch.ones(2, 4))  # the hooks write as before
    assert float(stats["mean"]) == pytest.approx(float(recorder.last))  # type: ignore[arg-type]


def _in_a_tuple(model: Leaves, y: Tensor) -> Tensor:
    model.state = (y.detach().mean(), 1)  # type: ignore[assignment]
    return y


def test_a_tuple_with_what_depends_on_the_batch_has_no_value() -> None:
    model = Leaves(_in_a_tuple)
    after_step(model)
    with pytest.raises(PlanError, match="'state"):
        model.state[0].item()  # type: ignore[index]


def _counts_in_a_list(model: Leaves, y: Tensor) -> Tensor:
    model.kept.append(y.shape[1])  # type: ignore[arg-type]
    return y


def test_a_list_of_numbers_that_grows_has_no_length() -> None:
    model = Leaves(_counts_in_a_list)
    after_step(model)
    with pytest.raises(PlanError, match="'kept' has no value after a step"):
        len(model.kept)


def test_a_hook_that_counts_its_calls_is_refused() -> None:
    model, calls = Leaves(lambda _, y: y), {"number": 0}

    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        calls["number"] += 1
        return output * 0.9 ** calls["number"]

    model.linear.register_forward_hook(hook)
    with pytest.raises(CaptureError, match='forward changes "calls'):
        capture(model, BATCH)
    assert calls["number"] == 0


def _flags(model: Leaves, y: Tensor) -> Tensor:
    model.width = y.shape[1]  # type: ignore[assignment]
    model.rows = y.shape[0]  # type: ignore[assignment]
    model.table["seen"] = True  # type: ignore[assignment]
    return y


def test_numbers_that_are_the_same_in_each_step_are_set_and_those_of_the_batch_have_no_value() -> None:
    model = Leaves(_flags)
    capture(model, BATCH)
    assert not hasattr(model, "width")
    after_step(model)
    assert model.width == 4
    assert model.table["seen"] is True
    with pytest.raises(PlanError, match="'rows' has no value after a step"):
        int(model.rows)  # type: ignore[call-overload]


def _with_function(model: Leaves, y: Tensor) -> Tensor:
    _with_function.last = y.detach()  # type: ignore[attr-defined]
    return y


def test_attributes_of_functions_and_classes_are_seen() -> None:
    model = Leaves(_with_function)

    class Counts(Leaves):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x)

    capture(model, BATCH)
    assert not vars(_with_function)
    after_step(model)
    with pytest.raises(PlanError, match=r"_with_function\.last' has no value"):
        _with_function.last.sum()  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match=r"Counts\.calls"):
        capture(Counts(lambda _, y: y), BATCH)
    assert Counts.calls == 0


def test_numbers_taken_of_tensors_by_a_hook_have_no_value() -> None:
    model, means = Leaves(lambda _, y: y), {"linear": 0.0}

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        means["linear"] = output.detach().abs().mean().item()

    model.linear.register_forward_hook(hook)
    after_step(model)
    with pytest.raises(PlanError, match=r"linear'.* has no value"):
        sum(means.values())


class Slotted:
    """What a script keeps a last value in, without a ``__dict__``."""

    __slots__ = ("last",)
    latest: Tensor | None = None

    def __init__(self) -> None:
        self.last: Tensor | None = None


def test_slots_and_classes_of_objects_are_seen() -> None:
    slotted = Slotted()

    def then(_: Leaves, y: Tensor) -> Tensor:
        slotted.last = y.detach()
        type(slotted).latest = y.detach()
        return y

    model = Leaves(then)
    capture(model, BATCH)
    assert slotted.last is None
    assert Slotted.latest is None
    after_step(model)
    for left in (slotted.last, Slotted.latest):
        with pytest.raises(PlanError, match="has no value after a step"):
            float(left)  # type: ignore[arg-type]
    Slotted.latest = None
