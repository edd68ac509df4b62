"""What can go wrong with an experiment, in one sentence."""


class ExperimentError(Exception):
    """An experiment cannot run, or its results cannot be used: what, and what to do next."""
