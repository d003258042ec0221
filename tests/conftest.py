"""Random tests have no deadline: how long one takes says something about the machine, nothing about the code."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("heterodyne", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("heterodyne")
