"""Time from a lab's build to forwarding, against plain Mininet building the same graph, side by side.

    python -m benchmarks.lab_startup [--rounds 5] [--hosts 8] [--out FILE]

Both build two datacenters of N hosts (a bridge and a router each) and a link between the routers, and are done when
the first host of one answers the last host of the other. Plain Mininet runs in an `unshare` sandbox of its own, so that
it may do what it likes; it has no WAN emulation at all, pddbed has its relay. Rounds alternate. Then the cost per host
from 8 to 64 hosts. Run as root.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import output, pddbed, require

SANDBOX = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
ROUTER_FORWARDING = "sysctl -qw net.ipv4.ip_forward=1"


def topology(hosts: int) -> str:
    lines = ["name: startup", "datacenters:"]
    for number, name in enumerate(("main", "remote"), start=1):
        names = ", ".join(f"{name}{index}: {{}}" for index in range(hosts))
        lines += [f"  {name}: {{subnet: 10.{number}.0.0/24, hosts: {{{names}}}}}"]
    lines += ["wan:", "  - {name: wan0, between: [main, remote], rate: 1gbit, delay: 0ms}"]
    return "\n".join(lines) + "\n"


def pddbed_up(hosts: int) -> tuple[float, float]:
    """(build to forwarding, the whole command), both in s."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "startup.yaml"
        file.write_text(topology(hosts))
        began = time.monotonic()
        state = json.loads(pddbed("up", str(file), "--no-workers", "--no-verify", "--json"))
        whole = time.monotonic() - began
        pddbed("down", "startup")
    return state["build_seconds"], whole


def plain_mininet(hosts: int) -> tuple[float, float]:
    """As `pddbed_up`, of a plain Mininet script."""
    began = time.monotonic()
    said = output([*SANDBOX, sys.executable, "-m", "benchmarks.lab_startup", "--plain", str(hosts)])
    return json.loads(said.splitlines()[-1])["seconds"], time.monotonic() - began


def build_plain(hosts: int) -> None:
    """Inside the sandbox: what a Mininet user would write, on Mininet's own classes."""
    from mininet.log import setLogLevel
    from mininet.net import Mininet
    from mininet.nodelib import LinuxBridge

    setLogLevel("critical")
    began = time.monotonic()
    net = Mininet(topo=None, controller=None, switch=LinuxBridge, build=False)
    routers = []
    for number in (1, 2):
        switch = net.addSwitch(f"s{number}")
        router = net.addHost(f"r{number}", ip=None)
        routers.append(router)
        net.addLink(router, switch, params1={"ip": f"10.{number}.0.1/24"})
        for index in range(hosts):
            host = net.addHost(
                f"h{number}x{index}", ip=f"10.{number}.0.{10 + index}/24", defaultRoute=f"via 10.{number}.0.1"
            )
            net.addLink(host, switch)
    net.addLink(*routers, params1={"ip": "172.31.0.0/31"}, params2={"ip": "172.31.0.1/31"})
    net.build()
    net.start()
    for number, router in enumerate(routers, start=1):
        router.cmd(ROUTER_FORWARDING)
        router.cmd(f"ip route add 10.{3 - number}.0.0/24 via 172.31.0.{2 - number}")
    first, last = net.get("h1x0"), f"10.2.0.{10 + hosts - 1}"
    while "1 received" not in first.cmd(f"ping -n -c 1 -W 1 {last}"):
        pass
    print(json.dumps({"seconds": time.monotonic() - began}))
    net.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=8)
    harness.add_option(parser)
    parser.add_argument("--plain", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        build_plain(arguments.plain)
        return
    require("brctl", "mnexec", "sysctl", "ip", "unshare")  # brctl: of Mininet's own LinuxBridge
    ours, theirs = [], []
    for number in range(arguments.rounds):
        ours.append(pddbed_up(arguments.hosts))
        theirs.append(plain_mininet(arguments.hosts))
        built, whole = ours[-1]
        print(f"round {number + 1}: pddbed {built:.2f} s ({whole:.2f} s in all), Mininet {theirs[-1][0]:.2f} s")
    result = {
        "hosts_per_datacenter": arguments.hosts,
        "rounds": arguments.rounds,
        "pddbed_build_s": statistics.median(build for build, _ in ours),
        "mininet_build_s": statistics.median(build for build, _ in theirs),
        "pddbed_whole_s": statistics.median(whole for _, whole in ours),
        "mininet_whole_s": statistics.median(whole for _, whole in theirs),
        "ratio_of_pairs": statistics.median(mine[0] / other[0] for mine, other in zip(ours, theirs, strict=True)),
        "build_s_by_hosts": {},
    }
    for hosts in (8, 16, 32, 64):
        result["build_s_by_hosts"][hosts] = min(pddbed_up(hosts // 2)[0] for _ in range(3))
    sizes = result["build_s_by_hosts"]
    print(f"build to forwarding: {result['ratio_of_pairs']:.2f} x plain Mininet (median of {arguments.rounds} pairs)")
    for small, large in ((8, 16), (16, 32), (32, 64)):
        each = (sizes[large] - sizes[small]) / (large - small)
        print(f"{small} -> {large} hosts: {sizes[large]:.2f} s, {1000 * each:.1f} ms for each host more")
    harness.write(arguments.out, result)


if __name__ == "__main__":
    main()
