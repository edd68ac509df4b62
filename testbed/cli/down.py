"""`pddbed down`: end labs and leave nothing of them."""

import click

from testbed.cli.options import lab_option, sentences, working


@click.command()
@click.argument("lab_argument", metavar="[LAB]", required=False)
@lab_option
@click.option("--all", "all_labs", is_flag=True, help="Every lab of this user.")
@sentences
def down(lab_argument: str | None, lab: str | None, all_labs: bool) -> None:
    """End a lab and everything in it. Succeeds when it is already gone."""
    from testbed.lab.record import find_record, live_records, state_root, sweep_dead
    from testbed.lab.start import down as end_lab

    if len([given for given in (lab_argument, lab, all_labs) if given]) > 1:
        raise click.UsageError("name one lab, or say --all")
    name = lab_argument or lab
    swept = sweep_dead()
    records = live_records()
    if all_labs:
        chosen = [record for record in records if record.directory.parent == state_root()]
    elif name is not None:
        chosen = [record for record in records if record.name == name][:1]  # this user's own comes before root's
    elif records:
        chosen = [find_record(None)]
    else:
        chosen = []
    for record in chosen:
        with working(f'ending lab "{record.name}"'):
            end_lab(record)
        click.echo(f'lab "{record.name}" is down')
    for name_swept in swept:
        click.echo(f'lab "{name_swept}" had died; its record is swept')
    if not chosen and not swept:
        click.echo(f'lab "{name}" is not up' if name else "no lab is up")
