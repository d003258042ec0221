"""The command line: one small file a verb."""

from heterodyne.cli.app import main

__all__ = ["main"]
