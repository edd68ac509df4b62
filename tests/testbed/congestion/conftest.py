"""Property tests without Hypothesis's deadline: it measures the load of this machine, not the code."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
