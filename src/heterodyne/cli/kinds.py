"""``heterodyne kinds``: which devices can be planned for without having them."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["command"]


def command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Only kinds with all these words in their names.")
    ] = None,
) -> int:
    """List the kinds of devices that the catalog knows.

    As a cluster file names them, with what their datasheets say.
    """
    from heterodyne.api.printing import show
    from heterodyne.cluster.catalog import catalog
    from heterodyne.errors import ClusterError
    from heterodyne.report.tables import kind_rows

    def has_all(*names: str) -> bool:
        return all(any(word.lower() in name.lower() for name in names) for word in words or ())

    found = [kind for kind in catalog().values() if has_all(kind.kind, kind.maker, *kind.aliases)]
    if not found:
        raise ClusterError(
            f"the catalog has no kind with {' and '.join(map(repr, words or ()))} in its name; heterodyne kinds lists all. A kind "
            "that is missing can be described in the cluster file, see docs/fleet.md"
        )
    show(kind_rows(found))
    return 0
