"""Contract between an experiment and the framework: parts to run in one lab, and what their records come to."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from experiments.framework.figures import Figure
from experiments.report.charts import Chart
from testbed.topology.overlay import Overlay

if TYPE_CHECKING:
    from experiments.framework.lab import ExperimentLab


class ExperimentError(Exception):
    """An experiment cannot run, or its results cannot be used: what, and what to do next."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run of an experiment."""

    quick: bool = False
    seeds: int = 3


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a run that is done or not done: what an interrupted run resumes by. `expected_s` is for the ETA.

    `variant`: of the topology, where not all parts run in one lab (see `Experiment.variation`).
    """

    name: str
    seed: int
    expected_s: float
    detail: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""


@dataclass(frozen=True)
class PartResult:
    """A part's records (lines of requests.jsonl) and what is known of it as a whole.

    `reasons` say why its figures are not to be trusted; empty when they are.
    """

    records: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    reasons: Sequence[str] = ()


@dataclass(frozen=True)
class Evaluation:
    """Contents of a report."""

    figures: Sequence[Figure]
    charts: Sequence[Chart] = ()
    notes: Sequence[str] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)


class Progress(Protocol):
    """Callback by which a part says how far it is, as a share from 0 to 1."""

    def __call__(self, share: float) -> None: ...


class Session(Protocol):
    """An experiment in its lab: processes started, connections warm."""

    def run(self, part: Part, directory: Path, progress: Progress) -> PartResult: ...


class Reported(ABC):
    """Evaluation of a run's records, as `pddbed report` needs it."""

    name: str

    @abstractmethod
    def evaluate(self, parameters: Mapping[str, Any], results: Mapping[str, tuple[Part, PartResult]]) -> Evaluation:
        """From the parts that are done (perhaps not all), by name. Pure: `pddbed report` calls it again later."""


class Experiment(Reported):
    """One published claim."""

    title: str
    claim: str
    with_workers: bool

    @abstractmethod
    def topology(self, options: Options) -> Path:
        """The lab's file."""

    def variation(self, variant: str) -> Overlay:
        """Overlay for the topology of that variant's parts."""
        raise NotImplementedError(f"{self.name} has no variants")

    @abstractmethod
    def parameters(self, options: Options) -> dict[str, Any]:
        """Everything that decides the result, the fit included; a run is resumed only with the same ones."""

    def shares(self, name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
        """True if parts of a run of experiment `name` are what this one would do, by both runs' parameters."""
        return name == self.name and theirs == ours

    @abstractmethod
    def parts(self, options: Options) -> list[Part]: ...

    @abstractmethod
    def session(self, lab: "ExperimentLab", options: Options) -> AbstractContextManager[Session]: ...


class Computation(Experiment):
    """A claim whose parts are calculated, without a lab. Its topology says what is simulated."""

    with_workers = False

    def session(self, lab: "ExperimentLab", options: Options) -> AbstractContextManager[Session]:
        raise NotImplementedError(f"{self.name} needs no lab")

    @abstractmethod
    def compute(self, part: Part, progress: Progress) -> PartResult:
        """The same result for the same part everywhere."""
