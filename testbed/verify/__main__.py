"""`python -m testbed.verify`: a request on standard input, progress and the result on standard output, as JSON lines.

A process of its own, so that measuring does not share an interpreter lock with the supervisor. It runs in the lab's
PID namespace and joins network namespaces thread by thread. Around what loads the links as much as they may be it says
so, and waits for a line in answer each time.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from testbed.verify.fabric import Fabric, measure_fabric
from testbed.verify.link import Target, floor_ns, verify_link
from testbed.verify.paths import Path, floors, verify_paths


def main() -> None:
    request = json.loads(sys.stdin.readline())
    targets = [Target.from_dict(values) for values in request["links"]]
    paths = [Path.from_dict(values) for values in request["paths"]]
    if request["what"] == "floor":
        _say(floors={target.name: floor_ns(target) for target in targets}, path_floors=floors(paths))
        return
    quick = request["quick"]
    results = [verify_link(target, quick, lambda text: _say(progress=text), _loading) for target in targets]
    with _loading():
        by_host = verify_paths(paths, quick)
        fabrics = [_fabric(Fabric.from_dict(values)) for values in request["fabrics"]]
    _say(links=results, paths=by_host, fabrics=fabrics)


@contextmanager
def _loading() -> Iterator[None]:
    _load(True)
    try:
        yield
    finally:
        _load(False)


def _load(on: bool) -> None:
    _say(load=on)
    sys.stdin.readline()


def _fabric(fabric: Fabric) -> dict[str, Any]:
    figures = [verdict.row() for verdict in measure_fabric(fabric)]
    return {"datacenter": fabric.datacenter, "between": fabric.between, "figures": figures}


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
