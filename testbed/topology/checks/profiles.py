"""Profiles: what each is relative to, that it is complete, and which hosts may name one."""

from collections.abc import Iterator

from testbed.model.units import quote
from testbed.topology.checks.finding import Finding
from testbed.topology.checks.hosts import hosts_of
from testbed.topology.explain import did_you_mean
from testbed.topology.problems import Path
from testbed.topology.profiles import NATIVE
from testbed.topology.salvage import readable
from testbed.topology.schema import TopologyFile
from testbed.topology.speeds import Profile, Share


def check_profiles(file: TopologyFile) -> Iterator[Finding]:
    if not readable(file.profiles):
        return
    for name, profile in file.profiles.items():
        path: Path = ("profiles", name)
        if name == NATIVE:
            yield Finding(path, f"{quote(NATIVE)} means no pacing; choose another name", at_key=True)
        yield from _relative(file, path, name) if profile.relative_to is not None else _absolute(path, profile)
    for path, _, host in hosts_of(file):
        if not readable(host.profile, host.role) or host.profile in (None, NATIVE) or host.role is None:
            continue
        if host.role == "gateway":
            yield Finding((*path, "profile"), "a gateway computes no tokens; remove its profile", at_key=True)
        elif host.profile not in file.profiles:
            yield Finding((*path, "profile"), _unknown(file, str(host.profile)))


def _unknown(file: TopologyFile, name: str) -> str:
    known = [NATIVE, *file.profiles]
    guess = did_you_mean(name, known) or f"; there are {', '.join(known)}"
    return f"{quote(name)} is not under profiles:{guess}"


def _absolute(path: Path, profile: Profile) -> Iterator[Finding]:
    for key, example in (("prefill", "9000 tokens/s"), ("decode", "30ms")):
        value = getattr(profile, key)
        if not readable(value, profile.relative_to):
            continue
        if value is None:
            message = f"has no {key}; write {key}: {example}, or relative_to: another profile"
            yield Finding(path, message, at_key=True)
        elif isinstance(value, Share):
            message = f"a percentage needs relative_to: the profile that it is of; or write {example}"
            yield Finding((*path, key), message)


def _relative(file: TopologyFile, path: Path, name: str) -> Iterator[Finding]:
    place = (*path, "relative_to")
    seen = [name]
    while True:
        other = file.profiles[seen[-1]].relative_to
        if not readable(other) or other is None:
            return
        if other not in file.profiles:
            if len(seen) == 1:  # else said at the one that names it
                yield Finding(place, _unknown(file, other) if other != NATIVE else "native has no speed of its own")
            return
        if other in seen:
            if other == name:
                yield Finding(place, f"leads back to itself: {' -> '.join([*seen, other])}")
            return
        seen.append(other)
