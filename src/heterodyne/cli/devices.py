"""``heterodyne devices``: what is here."""

from __future__ import annotations

from heterodyne.cli.options import ClusterOption

__all__ = ["command"]


def command(cluster: ClusterOption = None) -> None:
    """Show which devices are here.

    As a table: those of this machine, or those of a cluster file.
    """
    from heterodyne.api.printing import show
    from heterodyne.report.tables import device_rows

    if cluster is None:
        import socket

        from heterodyne.measure.discover import discover_machine

        found = discover_machine(socket.gethostname())
    else:
        from heterodyne.cluster.file import load_cluster

        found = load_cluster(cluster)
    show(device_rows(found))
