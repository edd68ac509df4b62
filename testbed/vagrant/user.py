"""The ordinary user as which a run's Vagrant, libvirt and QEMU work: in no file of the machine, gone with the run."""

import pwd
from dataclasses import dataclass
from pathlib import Path

NAME = "pddbed-vagrant"
RUN_UIDS = range(64900, 65000)  # where distributions put nobody


@dataclass(frozen=True, slots=True)
class Guest:
    """The user of one run."""

    uid: int  # also its group's number
    groups: tuple[int, ...]  # besides its own: the one that may use KVM


def choose() -> Guest:
    """A user whose number nobody has, neither in /etc/passwd nor as a process. Raises StopIteration after 100."""
    taken = {user.pw_uid for user in pwd.getpwall()}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            taken.add(path.stat().st_uid)
        except OSError:
            continue
    return Guest(next(uid for uid in RUN_UIDS if uid not in taken), _kvm_groups())


def _kvm_groups() -> tuple[int, ...]:
    """The group of /dev/kvm, unless that is root's."""
    try:
        group = Path("/dev/kvm").stat().st_gid
    except OSError:
        return ()
    return (group,) if group else ()
