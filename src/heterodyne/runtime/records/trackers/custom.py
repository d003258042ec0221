"""A tracker of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from heterodyne.runtime.records.trackers.tracker import Opening, Tracker

__all__ = ["REMEDY", "open_tracker"]

REMEDY = "see its factory"


def open_tracker(opening: Opening) -> Tracker:
    """Return what the option ``factory`` returns for the `Opening`, whose options are then ``arguments``."""
    factory = str(opening.options["factory"])
    source, _, name = factory.rpartition(":")
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location("heterodyne_custom_tracker", source)
        if spec is None or spec.loader is None:
            raise ImportError(f"{source} cannot be imported")
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    options = dict(opening.options.get("arguments") or {})
    tracker: Tracker = getattr(module, name)(
        Opening(directory=opening.directory, run=opening.run, done=opening.done, config=opening.config, options=options)
    )
    return tracker
