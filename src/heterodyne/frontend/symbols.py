"""Names in the graph: each tensor has one that no other has, whatever the user calls his.

torch.export names ops after their operators (``t``, ``add``, ``embedding``), and a model may hold parameters of these names, or take
inputs that are called as its buffers are. Parameters, buffers and constants keep theirs, the others are renamed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

__all__ = ["free_name", "name_ops"]


def free_name(name: str, taken: Collection[str]) -> str:
    """The name, or one like it that is not taken."""
    while name in taken:
        name += "'"
    return name


def name_ops(ops: Sequence[fx.Node], taken: Collection[str]) -> None:
    """Rename the ops whose names are taken. A name of a node is one of Python too."""
    for node in ops:
        while node.name in taken:
            node._rename(f"{node.name}_op")
