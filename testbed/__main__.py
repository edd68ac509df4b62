"""`python -m testbed`: the `pddbed` command, where it is not installed as one."""

from testbed.cli import main

if __name__ == "__main__":
    main(prog_name="pddbed")
