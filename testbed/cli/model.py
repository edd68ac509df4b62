"""`pddbed model list` and `pddbed model get`: which models there are, and fetching one."""

from __future__ import annotations

import json

import click

from testbed.cli import CommandError
from workers.models.config import ModelError
from workers.models.fetch import BUILT_IN, FETCHABLE, fetch, is_whole, model_path


@click.group()
def model() -> None:
    """List and fetch models that workers can run."""


@model.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_models(as_json: bool) -> None:
    """List built-in and fetchable models, and which of them are on this machine.

    A Hugging Face directory or a .gguf file may be named by its path instead.
    """
    rows = [
        {"name": name, "state": "built in", "path": None, "size_bytes": 0, "description": description}
        for name, description in BUILT_IN.items()
    ]
    for entry in FETCHABLE.values():
        path = model_path(entry)
        state = "not fetched" if not path.exists() else "ready" if is_whole(entry) else "corrupted"
        rows.append(
            {
                "name": entry.name,
                "state": state,
                "path": str(path) if path.exists() else None,
                "size_bytes": entry.size_bytes,
                "description": entry.description,
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['name']:<14} {row['state']:<12} {row['description']}")


@model.command("get")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and no progress.")
def get_model(name: str, as_json: bool) -> None:
    """Fetch the model NAME once; a second call only checks it."""
    if name in BUILT_IN:
        path = None
    elif name in FETCHABLE:
        try:
            path = str(_fetch(name, quiet=as_json))
        except ModelError as error:
            raise CommandError(str(error)) from error
    else:
        raise CommandError(f'unknown model "{name}"; run: pddbed model list')
    if as_json:
        click.echo(json.dumps({"name": name, "path": path}))
    else:
        click.echo(f"{name}: {path or 'built in, nothing to fetch'}")


def _fetch(name: str, quiet: bool) -> str:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    entry = FETCHABLE[name]
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bars:
        stages = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(f"{stage} {name}", total=total)
            bars.update(stages[stage], completed=min(done, total))

        return str(fetch(entry, progress))
