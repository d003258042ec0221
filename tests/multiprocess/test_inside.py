"""Outputs of modules inside of a model under any plan are those of a forward hook on one device, read or changed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heterodyne as hd
from heterodyne.errors import HeterodyneError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.model_output import loss_of
from life.plans import RANKS, plan_for
from life.script import SAMPLES
from multiprocess.models import makers
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import session_of
from pure.build import linear, profile

FAMILIES = (
    "gpt",
    "llama",
    "gpt2",
    "bert",
    "t5",
    "vit",
    "unet",
    "resnet",
    "mixtral",
    "qwen3_moe",
    "transformer",
    "attention",
)
PLANS = ("data 3", "zero 3", "interleaved", "split", "hybrid", "mixed")
BAR = 1e-5


@functools.cache
def graph_of(name: str) -> ModelGraph:
    return hd.capture(*made(name))


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    kind, frozen = name.partition(",")[::2]
    model, batch = makers()[kind](SAMPLES)
    for part in ("tokens", "norm") if frozen else ():
        model.get_submodule(part).requires_grad_(False)
    return model, batch


def started(
    world: World, name: str, kind: str, graph: ModelGraph, lr: float = 0.1
) -> tuple[nn.Module, dict[str, Tensor], hd.Distributed]:
    model, batch = made(name)
    return model, batch, started_with(world, model, batch, kind, graph, lr)


def started_with(
    world: World, model: nn.Module, batch: dict[str, Tensor], kind: str, graph: ModelGraph, lr: float = 0.1
) -> hd.Distributed:
    session = session_of(world)
    known = profile(graph, session.cluster, [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6)
    return hd.distribute(
        model,
        batch,
        optimizer=functools.partial(sgd, lr),
        plan=hd.PlanOptions(plan_for(kind, graph), profile=known, check_s=0),
        session=session,
    )


def sgd(lr: float, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def hooked(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, list[list[Tensor]]]:
    """The tensors that each module returns on one device, in the order of its calls."""
    seen: dict[str, list[list[Tensor]]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: seen.setdefault(name, []).append(
            [t.detach().clone() for t in tensors(output)]
        )

    handles = [part.register_forward_hook(keep(name)) for name, part in model.named_modules() if name]
    with torch.no_grad(), mha_fastpath(enabled=False):
        model.eval()(**batch)
    for handle in handles:
        handle.remove()
    return seen


@contextmanager
def mha_fastpath(*, enabled: bool) -> Iterator[None]:
    """Hooks see nothing of what the fast path of torch's attention fuses."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape, f"{found.shape} {wanted.shape}"
    assert found.dtype == wanted.dtype
    if not found.is_floating_point():
        return float((found != wanted).any())
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-6))


def looked_at(world: World, name: str, kind: str, graph: ModelGraph) -> tuple[dict[str, float], dict[str, str]]:
    """Of each module the error of its outputs, and of those that are refused why."""
    wanted = hooked(*made(name))
    _, batch, trainer = started(world, name, kind, graph)
    errors, refused = {}, {}
    inner = [path for path in wanted if path.endswith("experts.act_fn")]  # which see rows in the order of the experts
    paths = [path for path in wanted if path not in inner]
    with trainer:
        for path in inner:
            with pytest.raises(PlanError, match=rf"'{path}' is inside of routed experts, .*: ask for '{path[:-7]}'"):
                trainer.activations(path, batch)
            assert path not in trainer.activations(f"{path[:-19]}.*", batch)
        while True:
            try:
                found = trainer.activations(paths, batch)
                break
            except PlanError as fault:
                path = next(path for path in paths if f"{path!r}" in str(fault))
                refused[path] = str(fault)
                paths.remove(path)
    for path, output in found.items():
        calls = output if isinstance(output, list) else [output]
        assert len(calls) == len(wanted[path]), path
        for call, one in zip(calls, wanted[path], strict=True):
            pairs = zip(tensors(call), one, strict=True)
            errors[path] = max([errors.get(path, 0.0), *(error(a, b) for a, b in pairs)])
    return errors, refused


class Steering(nn.Module):
    """Of the script's own: trained through the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.vector, self.gate = nn.Parameter(torch.randn(width) * 0.3), nn.Linear(width, width)

    def forward(self, output: Tensor) -> Tensor:
        return output + self.vector + 0.1 * torch.tanh(self.gate(output))


EDITED = {
    "gpt": ("qkv", "out"),
    "gpt, its beginning frozen": ("norm", "head"),
    "mixtral": ("model.layers.0.mlp.experts", "model.layers.1"),
}
"""The module with a trained edit, and one with a function."""


def halved(output: Tensor) -> Tensor:
    return output * 0.5


def width_of(name: str) -> int:
    return hooked(*made(name))[EDITED[name][0]][0][0].shape[-1]


def by_hand(name: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], Tensor]:
    """On one device: the losses of two steps and of two evaluations, gradients of the edit, weights, and an activation."""
    model, batch = made(name)
    edit, (first, second) = Steering(width_of(name)), EDITED[name]
    of_model, of_edit = sgd(0.1, model.parameters()), sgd(0.1, edit.parameters())
    handles = [
        model.get_submodule(first).register_forward_hook(lambda _m, _i, output: edit(output)),
        model.get_submodule(second).register_forward_hook(lambda _m, _i, output: halved(output)),
    ]
    losses = []
    for _ in range(2):
        loss = loss_of(model.train()(**batch))
        for optimizer in (of_model, of_edit):
            optimizer.zero_grad()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in edit.named_parameters() if p.grad is not None}
        for optimizer in (of_model, of_edit):
            optimizer.step()
        losses.append(loss.item())
    seen: list[Tensor] = []
    with torch.no_grad():
        handle = model.get_submodule(first).register_forward_hook(lambda _m, _i, output: seen.append(output.clone()))
        losses.append(loss_of(model.eval()(**batch)).item())
        for each in (*handles, handle):
            each.remove()
        losses.append(loss_of(model(**batch)).item())
    return losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}, seen[0]


def edited(
    world: World, name: str, kind: str, graph: ModelGraph
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], Tensor]:
    """The same under a plan."""
    model, batch, trainer = started(world, name, kind, graph)
    edit, (first, second) = Steering(width_of(name)), EDITED[name]
    of_edit = sgd(0.1, edit.parameters())
    losses = []
    with trainer:
        with trainer.edit({first: edit, second: halved}):
            for _ in range(2):
                of_edit.zero_grad()
                losses.append(trainer.step(batch).loss)
                gradients = {n: p.grad.clone() for n, p in edit.named_parameters() if p.grad is not None}
                of_edit.step()
            losses.append(trainer.evaluate(batch))
            seen = trainer.activations(first, batch)[first]
        losses.append(trainer.evaluate(batch))
    return losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}, seen


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("gpt", kind) for kind in PLANS), ("gpt2", "split"), ("mixtral", "hybrid"), ("attention", "mixed")],
)
def test_outputs_of_modules_are_those_of_hooks_on_one_device(pool: Pool, name: str, kind: str) -> None:
    for errors, refused in pool.run(RANKS.get(kind, 2), looked_at, name, kind, pool.ask(graph_of, name)):
        assert errors
        assert not refused
        assert max(errors.values()) <= BAR, errors


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("gpt", kind) for kind in PLANS), ("gpt, its beginning frozen", "1F1B"), ("mixtral", "hybrid")],
)
def test_edits_and_what_they_train_are_those_of_one_device(pool: Pool, name: str, kind: str) -> None:
    losses, gradients, weights, seen = by_hand(name)
    for found in pool.run(RANKS.get(kind, 2), edited, name, kind, pool.ask(graph_of, name)):
        assert found[0] == pytest.approx(losses, rel=BAR)
        assert found[1].keys() == gradients.keys()
        assert max(error(found[1][key], gradients[key]) for key in gradients) <= BAR
        assert max(error(found[2][key], weights[key]) for key in weights) <= BAR
        assert error(found[3], seen) <= BAR


def asked_wrongly(world: World, graph: ModelGraph) -> list[str]:
    """What is said to each of the `WRONG` calls; and after all of them a step and a right call are what they would have been."""
    model, batch, trainer = started(world, "gpt", "hybrid", graph)
    said = []
    weight = model.get_submodule("head").weight
    edits: list[dict[str, Any]] = [
        {"qvk": halved},
        {"qkv": lambda output: output[..., :2]},
        {"qkv": lambda output: output - output.mean(0)},
        {"qkv": torch.rand_like},
        {"qkv": lambda output: (output, output)},
        {"qkv": lambda output: output.no_such()},
        {"qkv": lambda output: output * weight.sum()},
        {("qkv" if world.rank else "out"): halved},
        {"qkv": lambda output: output * (2 + world.rank)},
        {"qkv": lambda output: output if output.shape[0] <= 2 else output.roll(1, 0)},
        {"qkv": 3},
        {"qkv": halved, "*qkv": halved},
    ]
    with trainer:
        for wrong in edits:
            with pytest.raises(HeterodyneError) as refused, trainer.edit(wrong):
                trainer.step(batch)
            said.append(str(refused.value))
        with pytest.raises(HeterodyneError) as refused:
            trainer.activations(["tokens", "quv"], batch)
        said.append(str(refused.value))
        with pytest.raises(HeterodyneError) as refused:
            trainer.activations("norm", {name: tensor[: SAMPLES - (world.rank == 1)] for name, tensor in batch.items()})
        said.append(str(refused.value))
        assert trainer.step(batch).loss == pytest.approx(loss_of(made("gpt")[0](**batch)).item(), rel=BAR)
        parts = trainer.activations("qkv", batch, gather=False)["qkv"]
        whole = trainer.activations("qkv", batch, on="rank0")
    with pytest.raises(HeterodyneError) as refused:
        trainer.activations("norm", batch)
    said.append(str(refused.value))
    assert bool(whole) == (world.rank == 0)
    of_all = trainer._session.communicator.all_gather_object([(p.first, p.count, p.output) for p in parts])
    if world.rank == 0:
        covered = {first: output for own in of_all for first, _, output in own}
        assert torch.equal(torch.cat([covered[first] for first in sorted(covered)]), whole["qkv"])
    return said


WRONG = (
    "no module of .* is called 'qvk'; the nearest are 'qkv'",
    "the edit of 'qkv' makes a float32 tensor of shape .* of a float32 tensor of shape",
    "the edit of 'qkv' makes something else of several samples together",
    "draw random numbers",
    "the edit of 'qkv' returns a tuple of 2 where the module returns a float32 tensor",
    "the edit of 'qkv' fails .* AttributeError",
    "parameters of the model|not held|holds",
    "rank 1 asks for",
    "the edit of 'qkv' is another on rank 1 than on rank 0",
    "the edit of 'qkv' makes something else of several samples together",
    "the edit of 'qkv' is 3: give a function",
    "'qkv' and '[*]qkv' both edit 'qkv': give each module one function",
    "is called 'quv'",
    "rank 1 gives another batch than rank 0",
    "is closed",
)


def test_what_cannot_be_edited_is_refused_on_all_ranks(pool: Pool) -> None:
    for said in pool.run(3, asked_wrongly, pool.ask(graph_of, "gpt")):
        assert len(said) == len(WRONG)
        for text, pattern in zip(said, WRONG, strict=True):
            assert re.search(pattern, text), (pattern, text)


@dataclass
class Pair:
    hidden: Tensor
    size: int


class Together(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Pair:
        return Pair(self.part(x), x.shape[-1])


class Odd(nn.Module):
    """What follows writes into the output of a module; outputs that are objects; a module of two names that is called twice; containers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Together(nn.Linear(8, 8))])
        self.again = self.first
        self.idle = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.relu_()
        hidden = self.blocks[0](hidden)
        hidden += 1.5
        hidden = self.blocks[1](self.again(hidden)).hidden
        return (hidden - y).square().mean()


def odd(kind: str, steer: Callable[[str], Steering]) -> tuple[nn.Module, dict[str, Tensor], dict[str, Steering]]:
    torch.manual_seed(0)
    model, batch = Odd(), {"x": torch.randn(SAMPLES, 8), "y": torch.randn(SAMPLES, 8)}
    return model, batch, {path: steer(path) for path in ("first", "blocks.0", "blocks.1.part")}


@functools.cache
def odd_graph() -> ModelGraph:
    model, batch, _ = odd("", lambda _: Steering(8))
    return hd.capture(model, batch)


def steered_oddly(world: World, kind: str, graph: ModelGraph) -> tuple[float, dict[str, Tensor], dict[str, Any]]:
    model, batch, edits = odd(kind, lambda _: Steering(8))
    trainer = started_with(world, model, batch, kind, graph)
    with trainer:
        found = trainer.activations(["*"], batch)
        alias = trainer.activations("again", batch)["again"]
        assert all(torch.equal(a, b) for a, b in zip(alias, found["first"], strict=True))
        with pytest.raises(PlanError, match="'idle' returns no tensor that the loss depends on"):
            trainer.activations("idle", batch)
        outer = Steering(8)
        with trainer.edit({"first": outer}), trainer.edit(edits):
            loss = trainer.step(batch).loss
    edits["outer"] = outer
    gradients = {
        f"{path}.{n}": p.grad for path, edit in edits.items() for n, p in edit.named_parameters() if p.grad is not None
    }
    return loss, gradients, found


@pytest.mark.parametrize("kind", ["data", "1F1B", "split", "hybrid"])
def test_odd_modules_are_as_on_one_device(pool: Pool, kind: str) -> None:
    model, batch, edits = odd(kind, lambda _: Steering(8))
    seen = hooked(model, batch)
    outer = Steering(8)
    model.get_submodule("first").register_forward_hook(lambda _m, _i, output: outer(output))
    for path, edit in edits.items():
        model.get_submodule(path).register_forward_hook(lambda _m, _i, output, edit=edit: edit(output))
    loss = model.train()(**batch)
    loss.backward()
    edits["outer"] = outer
    wanted = {f"{path}.{n}": p.grad for path, edit in edits.items() for n, p in edit.named_parameters()}
    for found_loss, gradients, found in pool.run(RANKS.get(kind, 2), steered_oddly, kind, odd_graph()):
        assert found_loss == pytest.approx(loss.item(), rel=BAR)
        assert gradients.keys() == wanted.keys()
        assert max(error(gradients[key], wanted[key]) for key in gradients) <= BAR
        assert found.keys() == {"first", "blocks.0", "blocks.1", "blocks.1.part"}
        assert set(found["blocks.1"]) == {"hidden", "size"}
        assert error(found["blocks.1"]["hidden"], found["blocks.1.part"]) == 0
        assert all(error(a, b[0]) <= BAR for a, b in zip(found["first"], seen["first"], strict=True))
