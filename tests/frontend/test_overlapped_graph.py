"""Two halves in turns: while one of them waits, the other one computes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import fx

from heterodyne.frontend.in_turns import overlapped_graph

HALVES = ("0", "1")


def stage() -> fx.GraphModule:
    """Two layers whose results are laid out otherwise, the second time two tensors at once; conversion 9 exchanges nothing."""
    graph = fx.Graph()
    _, members, tokens, weight = (graph.placeholder(name) for name in ("samples", "members", "tokens", "weight"))
    first = graph.call_function(torch.matmul, (tokens, weight))
    first = graph.call_method("convert", (members, first, 0))
    second = graph.call_function(torch.matmul, (first, weight))
    one, two = (graph.call_method("convert", (members, of, n)) for n, of in ((1, second), (2, first)))
    third = graph.call_method("convert", (members, graph.call_function(torch.add, (one, two)), 9))
    last = graph.call_method("convert", (members, third, 3))
    graph.output((last,))
    return fx.GraphModule({}, graph)


def overlapped() -> fx.GraphModule:
    return overlapped_graph(stage(), divided=["tokens"], exchanged=lambda number: number != 9)


class Recording:
    """Members that note what is asked of them; what they convert, they multiply."""

    def __init__(self, half: str, log: list[tuple[str, str]]) -> None:
        self.half, self.log = half, log

    def take_turn(self) -> None:
        self.log.append(("turn", self.half))

    def begin(self, tensor: torch.Tensor, step: int) -> tuple[torch.Tensor, int]:
        self.log.append((f"begin {step}", self.half))
        return tensor, step

    def end(self, begun: tuple[torch.Tensor, int]) -> torch.Tensor:
        self.log.append((f"end {begun[1]}", self.half))
        return self.convert(*begun)

    def convert(self, tensor: torch.Tensor, step: int) -> torch.Tensor:
        return tensor * (step + 1)


def ran() -> tuple[list[tuple[str, str]], list[torch.Tensor], list[torch.Tensor]]:
    """What happened, what the halves gave, and what they give alone."""
    log: list[tuple[str, str]] = []
    members = [Recording(half, log) for half in HALVES]
    tokens = [torch.rand(n, 3) for n in (2, 1)]
    weight = torch.rand(3, 3)
    arguments = [of for n, own, given in zip((2, 1), members, tokens, strict=True) for of in (n, own, given)]
    found = overlapped()(*arguments, weight)
    alone = [stage()(n, own, given, weight)[0] for n, own, given in zip((2, 1), members, tokens, strict=True)]
    return log, [made for (made,) in found], alone


def test_each_half_gives_what_it_gives_alone() -> None:
    _, found, alone = ran()
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_the_halves_take_turns_wherever_something_is_exchanged() -> None:
    log, _, _ = ran()
    turns = [half for what, half in log if what == "turn"]
    assert all(a != b for a, b in pairwise(turns))
    assert len(turns) == 2 * 4  # the second exchange and the third are one; what exchanges nothing is no reason to turn


def test_between_beginning_and_end_the_other_half_has_its_turn() -> None:
    log, _, _ = ran()
    for half in HALVES:
        for step in range(4):
            begun, ended = log.index((f"begin {step}", half)), log.index((f"end {step}", half))
            between = {other for what, other in log[begun:ended] if what == "turn"} - {half}
            assert between, (half, step)


def test_all_begin_in_the_same_order_as_they_end() -> None:
    """Members meet in the order in which they begin, so the order must not depend on who is ahead."""
    log, _, _ = ran()
    begun = [(what.split()[1], half) for what, half in log if what.startswith("begin")]
    ended = [(what.split()[1], half) for what, half in log if what.startswith("end")]
    assert begun == ended
