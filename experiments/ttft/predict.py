"""What the simulator says of a part: the same trace, the same fit, and the lab's coarser tokens. Pure."""

from dataclasses import replace

from experiments.sim.outcome import Run
from experiments.sim.simulator import simulate
from experiments.sim.variants import VARIANTS
from experiments.traces.sessions import generate_sessions
from experiments.ttft.fit import Fit
from experiments.ttft.shape import Shape


def predicted(fit: Fit, shape: Shape, name: str, seed: int, requests: int) -> Run:
    """Answers of so many of the lab's tokens, each of which takes as long as the tokens that it stands for."""
    recipe = fit.recipe(seed, requests, shape.sessions)
    trace, deployment = generate_sessions(recipe), fit.deployment()
    answers = tuple(replace(one, output_tokens=shape.answer(one.output_tokens)) for one in trace.requests)
    deployment = replace(
        deployment,
        relay_itl_s=deployment.relay_itl_s * shape.output_divisor,
        main_itl_s=deployment.main_itl_s * shape.output_divisor,
    )
    return simulate(replace(trace, requests=answers), VARIANTS[name], deployment, recipe.warm_up)
