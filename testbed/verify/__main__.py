"""`python -m testbed.verify`: a request on standard input, progress and the result on standard output, as JSON lines.

A process of its own, so that measuring does not share an interpreter lock with the supervisor. It runs in the lab's
PID namespace and joins network namespaces thread by thread.
"""

import json
import sys
from typing import Any

from testbed.verify.fabric import Fabric, measure_fabric
from testbed.verify.link import Target, floor_ns, verify_link


def main() -> None:
    request = json.load(sys.stdin)
    targets = [Target.from_dict(values) for values in request["links"]]
    if request["what"] == "floor":
        _say(floors={target.name: floor_ns(target) for target in targets})
        return
    results = [verify_link(target, request["quick"], lambda text: _say(progress=text)) for target in targets]
    fabrics = [_fabric(Fabric.from_dict(values)) for values in request["fabrics"]]
    _say(links=results, fabrics=fabrics)


def _fabric(fabric: Fabric) -> dict[str, Any]:
    figures = [verdict.row() for verdict in measure_fabric(fabric)]
    return {"datacenter": fabric.datacenter, "between": fabric.between, "figures": figures}


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
