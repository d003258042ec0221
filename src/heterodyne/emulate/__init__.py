"""A cluster of unequal workers on one machine, made by the operating system."""

from heterodyne.emulate.engine import Mechanism, emulate

__all__ = ["Mechanism", "emulate"]
