"""One finding per thing a lab uses, and what they come to. Pure."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "missing", "limited"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing. `missing` stops every lab, `limited` takes something away; both come with a next step."""

    name: str
    state: State
    detail: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and the WAN driver that `auto` means here (None: neither works)."""

    findings: tuple[Finding, ...]
    driver: str | None
    driver_reason: str

    @property
    def can_raise_lab(self) -> bool:
        return self.driver is not None and all(finding.state != "missing" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "can_raise_lab": self.can_raise_lab,
            "wan_driver": self.driver,
            "wan_driver_reason": self.driver_reason,
            "findings": [asdict(finding) for finding in self.findings],
        }


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def missing(name: str, detail: str, next_step: str) -> Finding:
    return Finding(name, "missing", detail, next_step)


def limited(name: str, detail: str, next_step: str) -> Finding:
    return Finding(name, "limited", detail, next_step)
