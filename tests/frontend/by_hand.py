"""A pipeline played by hand in one process: what stages send is handed to those that receive it, and gradients back; and what it is
compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from heterodyne.frontend import BoundStage, Captured, StageProgram, loss_of

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-5, "atol": 1e-7}
Gradients = Mapping[str, Tensor | None]


def programs_of(captured: Captured, starts: Sequence[int]) -> list[StageProgram]:
    """The stages of a cut."""
    stops = [*starts[1:], len(captured.graph.ops)]
    return [captured.stage(start, stop, starts=starts) for start, stop in zip(starts, stops, strict=True)]


@dataclass
class Pipeline:
    """The stages of a cut, bound to one model."""

    programs: list[StageProgram]
    stages: list[BoundStage]

    @classmethod
    def of(cls, captured: Captured, starts: Sequence[int], module: nn.Module) -> Pipeline:
        programs = programs_of(captured, starts)
        return cls(programs, [program.bind(module, CPU) for program in programs])

    def forward(self, batch: Mapping[str, Tensor], samples: int) -> Forward:
        """Each stage in turn. Each is given only what it says that it reads, its inputs as tensors of its own."""
        sent: dict[str, Tensor] = {}
        done = Forward(self.programs, [], [])
        for program, stage in zip(self.programs, self.stages, strict=True):
            received = {
                # Contiguous, as what comes over a link is.
                value.name: sent[value.name]
                .detach()
                .contiguous()
                .requires_grad_(value.differentiable and torch.is_grad_enabled())
                for value in program.receives
            }
            made = stage({name: batch[name] for name in program.inputs}, received, samples)
            assert list(made) == [value.name for value in program.sends] + ["loss"] * program.is_last
            sent.update(made)
            done.received.append(received)
            done.made.append(made)
        return done


@dataclass
class Forward:
    """What was received and made, stage by stage."""

    programs: list[StageProgram]
    received: list[dict[str, Tensor]]
    made: list[dict[str, Tensor]]

    @property
    def loss(self) -> Tensor:
        (loss,) = [made["loss"] for made in self.made if "loss" in made]
        return loss

    def backward(self) -> None:
        """From the last stage to the first; a value's gradient is the sum of those that its consumers send back."""
        gradients: dict[str, Tensor] = {}
        for program, received, made in reversed(list(zip(self.programs, self.received, self.made, strict=True))):
            roots = {name: gradients[name] for name in made if name in gradients}
            if program.is_last:
                roots["loss"] = torch.ones_like(made["loss"])
            if roots:
                torch.autograd.backward([made[name] for name in roots], list(roots.values()))
            for value in program.receives:
                gradient = received[value.name].grad
                assert gradient is None or value.differentiable
                if gradient is not None:
                    known = gradients.get(value.name)
                    gradients[value.name] = gradient if known is None else known + gradient


def take_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """The gradients by name; the module has none after."""
    found = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def eager(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Gradients]:
    loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), take_gradients(model)


def piped(
    captured: Captured, starts: list[int], model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Gradients]:
    done = Pipeline.of(captured, starts, model).forward(batch, samples_of(batch))
    done.backward()
    return done.loss.detach(), take_gradients(model)


def samples_of(batch: Mapping[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def assert_gradients(found: Gradients, expected: Gradients, *, rtol: float, atol: float) -> None:
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=atol, msg=name)


def assert_same_buffers(one: nn.Module, other: nn.Module) -> None:
    for (name, buffer), (_, expected) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def block_starts(captured: Captured) -> list[int]:
    return [block.start for block in captured.graph.blocks]


@st.composite
def cuts(draw: st.DrawFn, captured: Captured) -> list[int]:
    places = st.integers(1, len(captured.graph.ops) - 1)
    return [0, *sorted(draw(st.sets(places, min_size=1, max_size=5)))]
