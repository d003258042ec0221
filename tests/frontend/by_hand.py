"""A pipeline played by hand in one process: what stages send is handed to those that receive it, and gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heterodyne.frontend import BoundStage, Captured, StageProgram

CPU = torch.device("cpu")


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
                value.name: sent[value.name].detach().contiguous().requires_grad_(value.differentiable)
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
