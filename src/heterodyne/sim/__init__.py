"""The simulator: what should happen when a program runs."""

from heterodyne.sim.engine import Deadlock, Engine
from heterodyne.sim.run import Simulation, simulate

__all__ = ["Deadlock", "Engine", "Simulation", "simulate"]
