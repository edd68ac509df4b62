"""`python -m workers`: the role named in the environment (PDDBED_*), in a process of its own."""

import sys

from msgspec import structs

from workers.environment import EnvironmentProblem, read_environment
from workers.models import ModelError, load_model
from workers.process import run


def main() -> int:
    """Exit status: 0 stopped by a signal, 1 failed, 2 wrong environment."""
    try:
        environment = read_environment()
    except EnvironmentProblem as error:
        print(f"pddbed worker: {error}", file=sys.stderr)
        return 2
    spec = environment.model
    if environment.role == "gateway":  # it computes nothing
        spec = structs.replace(spec, device="cpu")
    try:
        loaded = load_model(spec)
    except ModelError as error:
        print(f"pddbed worker: {error}", file=sys.stderr)
        return 1
    return run(environment, loaded)


if __name__ == "__main__":
    sys.exit(main())
