"""External programs that the project calls, and a pytest plugin that sees which ones the tests really call.

A program is *provided* when its Debian package is one that `make packages` installs, one that those depend on, or part
of the smallest Debian system plus what the README asks for (git, make). `OPTIONAL` ones are looked for before use.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from testbed.vagrant.machine import TOOLS as VAGRANT_TOOLS

ROOT = Path(__file__).parent.parent
ASKED_FOR = ("git", "make", "ca-certificates")  # by the README, of whoever clones

OPTIONAL = {
    "dot": "Graphviz: the drawing for it is tested where it is installed",
    "ovs-vsctl": "Open vSwitch: `switch: ovs` is refused without it",
    "ovsdb-server": "the same",
    "ovs-vswitchd": "the same",
    "ovsdb-tool": "the same",
    "brctl": "benchmarks/lab_startup.py compares with plain Mininet, and says what it lacks",
}

_CALLS = {
    *("run", "Popen", "check_output", "check_call", "call", "create_subprocess_exec", "which", "required"),
    *("execvp", "execvpe", "execv", "execve", "execlp", "_run", "popen"),
}


def in_python(source: str) -> set[str]:
    """Programs that Python code names where it starts one: `run(["ip", ...])`, `lab.exec("md0", "ping", ...)`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first, words = (node.args[0] if node.args else None), [_text(argument) for argument in node.args]
        if name in _CALLS and isinstance(first, ast.List | ast.Tuple):
            words = [_text(element) for element in first.elts]
        elif name in {"exec", "inside"}:
            words = words[1:]  # the first is a host
        elif name not in {"which", "required", "execvp", "execlp"}:
            continue
        if words and words[0]:
            found |= in_command(words)
    return found


def in_command(words: list[str | None]) -> set[str]:
    """Programs of one command's words, those behind `env`, `timeout` and the like and inside `sh -c` among them."""
    found: set[str] = set()
    while words and words[0]:
        program = words[0]
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", program.rsplit("/", 1)[-1]):
            return found
        if Path(program).is_dir():
            return found
        found.add(program.rsplit("/", 1)[-1])
        if program in {"sh", "bash"}:
            script = next((word for option, word in pairwise(words) if option and option[0] == "-"), None)
            return found | in_shell(script or "")
        if program == "unshare" and "--" not in words and None in words:
            return found
        if program not in {"env", "timeout", "nice", "unshare", "setpriv", "chrt", "sudo"}:
            return found
        rest = words[1:]
        while rest and rest[0] and rest[0][0] in "-0123456789":
            rest = rest[2:] if rest[0] == "-s" else rest[1:]
        words = rest
    return found


def in_shell(script: str) -> set[str]:
    """Programs that stand where a command begins in a script of sh."""
    script = re.sub(r"(?<!\$)#.*|'[^']*'|\\\n", " ", script)
    found = set()
    for part in re.split(r"\|\|?|&&?|;|\$\(|`|\n|\bthen\b|\bdo\b|\belse\b|\bexec\b|\(", script):
        words = part.split()
        while words and re.match(r"[A-Za-z_]\w*=|(if|while|until|!|\{)$", words[0]):
            words = words[1:]
        if words and words[0] not in _shell_words() and re.fullmatch(r"[a-z][a-z0-9_.+-]*", words[0]):
            found.add(words[0])
    return found


@cache
def _shell_words() -> set[str]:
    return set(subprocess.run(["bash", "-c", "compgen -bk"], capture_output=True, text=True, check=True).stdout.split())


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def unprovided(programs: Iterable[str]) -> dict[str, str]:
    """Those that a fresh machine would lack, with the package that has each here. Needs Debian's dpkg-query."""
    provided, lacking = provided_packages(), {}
    for program in sorted(set(programs) - set(OPTIONAL)):
        found = shutil.which(program, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        if found is None and VAGRANT_TOOLS.get(program) not in made_packages():
            lacking[program] = "not on this machine"
        owners = _owners(found) if found else provided
        if not owners & provided:
            lacking[program] = f"of package {', '.join(sorted(owners)) or 'none'}"
    return lacking


def _owners(path: str) -> set[str]:
    for candidate in {path, str(Path(path).resolve()), path.removeprefix("/usr"), f"/usr{path}"}:
        done = subprocess.run(["dpkg-query", "-S", candidate], capture_output=True, text=True)
        if done.returncode == 0:
            return {line.split(":")[0] for line in done.stdout.splitlines() if not line.startswith("diversion")}
    return set()


@cache
def provided_packages() -> set[str]:
    """Debian packages that a machine has after `make packages`, dependencies included, recommendations not."""
    form = "${Package}\t${Essential}\t${Priority}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    table = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True).stdout
    depends, providers, begin = {}, {}, {*made_packages(), *ASKED_FOR}
    for line in table.splitlines():
        package, essential, priority, provides, needs = line.split("\t")
        depends[package] = re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]*)", needs)
        for name in re.findall(r"(?:^|,)\s*([a-z0-9][a-z0-9.+-]*)", provides):
            providers.setdefault(name, package)
        if essential == "yes" or priority == "required":
            begin.add(package)
    found: set[str] = set()
    while begin:
        package = begin.pop()
        package = package if package in depends else providers.get(package, package)
        if package not in found:
            found.add(package)
            begin |= set(depends.get(package, []))
    return found


def made_packages() -> set[str]:
    """Packages that the Makefile installs, for everything and for the Vagrant VM."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    return {word for line in re.findall(r"^(?:VAGRANT_)?PACKAGES\s*:=(.*)$", text, re.M) for word in line.split()}


_called: set[str] = set()


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in {"subprocess.Popen", "os.exec", "os.posix_spawn"}:
        program = os.fsdecode(arguments[0] or "")
        if not program.startswith(str(ROOT)) and Path(program).name != Path(sys.executable).name:
            _called.add(Path(program).name)


sys.addaudithook(_hear)


class _Workers:
    """Gathers what the tests of pytest-xdist's workers have called."""

    def pytest_testnodedown(self, node: Any) -> None:
        _called.update(getattr(node, "workeroutput", {}).get("programs", ()))


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Workers())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which a test called a program that no installation step provides is red, and says which."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["programs"] = sorted(_called)
    elif shutil.which("dpkg-query") and session.exitstatus == 0 and "PDDBED_VM_OUTPUT" not in os.environ:
        lacking = unprovided(name for name in sorted(_called) if not name.startswith("no-such-"))
        if lacking:
            print(f"\ncalled by tests, and provided by no installation step: {lacking}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
