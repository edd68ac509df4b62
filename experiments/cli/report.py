"""`pddbed report DIR`: a run directory's report, made anew from its records."""

import click


@click.command()
def report() -> None:
    """Make a run directory's report anew."""
