"""The code behind a graph, as a digest: two models of the same ops may still differ in backwards and hooks."""

from __future__ import annotations

import hashlib
import linecache

from torch import fx, nn

from heterodyne.around_model import HOOKS
from heterodyne.frontend.faults import files_of

__all__ = ["code_digest"]


def code_digest(graph: fx.Graph, model: nn.Module) -> str:
    """16 hex digits of the files that the forward comes through, torch's own left out, and of the hooks of the modules, with theirs."""
    hooks = [
        (path, hook)
        for path, module in model.named_modules()
        for kind in HOOKS
        for hook in getattr(module, kind).values()
    ]
    files = {file for node in graph.nodes for file in files_of(node)}
    files |= {hook.__code__.co_filename for _, hook in hooks if hasattr(hook, "__code__")}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update("".join(linecache.getlines(file)).encode())
    for path, hook in hooks:
        digest.update(f"{path}: {getattr(hook, '__qualname__', type(hook).__qualname__)}".encode())
    return digest.hexdigest()[:16]
