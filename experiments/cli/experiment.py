"""`pddbed experiment list|run|fit`: the published figures, reproduced."""

import click


@click.group()
def experiment() -> None:
    """Reproduce the published figures."""
