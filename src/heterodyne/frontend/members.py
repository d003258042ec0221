"""What a sharded graph calls of the devices that hold its parts."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

__all__ = ["Members"]


class Members(Protocol):
    """The devices of a stage, for a micro-batch of some number of samples. Steps, slots and functions are named by number."""

    def convert(self, tensor: Tensor, step: int) -> Tensor:
        """Lay a tensor out otherwise."""

    def begin(self, tensor: Tensor, step: int) -> Any:
        """The same in two calls; what is returned is for `end`."""

    def end(self, begun: Any) -> Tensor: ...

    def begin_experts(self, slot: int, *arguments: Any) -> Any:
        """`experts_between` in three calls."""

    def run_experts(self, begun: Any) -> Any: ...
    def end_experts(self, begun: Any) -> Tensor: ...

    def take_turn(self) -> None:
        """Told where a micro-batch runs as two halves: it is this one's turn."""

    def length(self, slot: int) -> int:
        """Return the length of this device's slice."""

    def portion(self, slot: int, count: int) -> int:
        """Return how many of a number of equal parts of the dim that is cut are this device's."""

    def drawn(self, slot: int, function: int, *arguments: Any, **options: Any) -> Tensor:
        """Call a function that draws random numbers for a slice of a tensor."""

    def drawn_within(self, slot: int, method: str, *arguments: Any, **options: Any) -> Tensor:
        """Call a method of these that draws random numbers, along another axis."""

    def part_of_mean(self, slot: int, tensor: Tensor, *arguments: Any, **options: Any) -> Tensor: ...
    def embedding(self, slot: int, ids: Tensor, weight: Tensor, **options: Any) -> Tensor: ...
    def softmax(self, slot: int, tensor: Tensor, dim: int, *options: Any) -> Tensor: ...
    def log_softmax(self, slot: int, tensor: Tensor, dim: int, *options: Any) -> Tensor: ...
    def cross_entropy(self, slot: int, logits: Tensor, labels: Tensor, *options: Any) -> Tensor: ...
    def part_of_mean_loss(self, slot: int, function: int, *arguments: Any) -> Tensor: ...
    def attention(self, slot: int, *arguments: Any, **options: Any) -> Tensor: ...
    def experts_here(self, slot: int, *arguments: Any) -> Tensor: ...
    def experts_between(self, slot: int, *arguments: Any) -> Tensor: ...
