"""`pddbed schema`: the JSON Schema of a topology file."""

import click

from testbed.cli.options import print_json


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
