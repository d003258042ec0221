"""When activations that wait in the memory of the host have left the device, and when they begin to come back.

They begin to leave inside of the forward, block by block. What is still on its way behind it has the next pass of the rank to leave in;
unless that is its own backward, which takes what is still there as it is. Of what comes back a backward asks for one block ahead of the
other, which needs least room; or all of a micro-batch begins to come so many passes before it, or where it would wait for its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from heterodyne.plan.program import Action

__all__ = ["with_offload"]


def with_offload(order: Sequence[Action], hosted: Mapping[int, int | None]) -> Iterator[Action]:
    """The passes of a place with OFFLOAD and RELOAD. ``hosted``: of each stage that keeps something on the host, how many passes ahead of
    its backwards it begins to come back; None: inside of them."""
    forward = {(a.stage, a.index): at for at, a in enumerate(order) if a.kind == "F" and a.stage in hosted}
    before: dict[int, list[Action]] = {}
    behind: dict[int, list[Action]] = {}
    for at, action in enumerate(order):
        of = action.stage, action.index
        if action.kind not in ("B", "I") or of not in forward or at <= forward[of] + 1:
            continue
        left = forward[of] + 1
        behind.setdefault(left, []).append(Action(action.stage, "OFFLOAD", action.index))
        ahead = hosted[action.stage]
        if ahead is not None:
            before.setdefault(max(left + 1, at - ahead), []).append(Action(action.stage, "RELOAD", action.index))
    for at, action in enumerate(order):
        yield from before.get(at, ())
        yield action
        yield from behind.get(at, ())
