"""`pddbed validate` and `pddbed schema`: topology files checked, and the JSON Schema of them."""

import os
from pathlib import Path
from typing import Any

import click

from testbed.cli.options import json_option, print_json
from testbed.cli.output import echo


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
@click.pass_context
def validate(context: click.Context, files: tuple[Path, ...], as_json: bool) -> None:
    """Check topology files and print a summary of each.

    Every mistake is printed, with its line. Nothing is built, and no privilege is needed. Exit status 1 when any
    file has a mistake.
    """
    from testbed.topology import TopologyErrors, load_plan
    from testbed.topology.describe import describe, plan_as_dict

    results: list[dict[str, Any]] = []
    for file in files:
        try:
            plan = load_plan(file)
        except TopologyErrors as errors:
            results.append({"file": str(file), "valid": False, "errors": [p.as_dict() for p in errors.problems]})
            if not as_json:
                _print_errors(errors)
        else:
            results.append({"file": str(file), "valid": True, "plan": plan_as_dict(plan)})
            if not as_json:
                echo("\n".join([f"{file}: {describe(plan)[0]}", *describe(plan)[1:]]))
    if as_json:
        print_json(results)
    if not all(result["valid"] for result in results):
        context.exit(1)


def _print_errors(errors: Any) -> None:
    from testbed.topology.problems import MOST_SHOWN

    for problem in errors.problems[:MOST_SHOWN]:
        echo(problem, err=True)
        excerpt = problem.excerpt()
        if excerpt:
            click.echo(click.style(excerpt, dim=True) if not os.environ.get("NO_COLOR") else excerpt, err=True)
    count = len(errors.problems)
    if count > 1:
        echo(f"{errors.problems[0].file}: {count} mistakes", err=True)


@click.command()
def schema() -> None:
    """Print the JSON Schema of topology files, for editors.

    \b
    pddbed schema > topology.schema.json
    then begin a topology file with this line (YAML language server):
    # yaml-language-server: $schema=topology.schema.json
    """
    from testbed.topology.schema import json_schema

    print_json(json_schema())
