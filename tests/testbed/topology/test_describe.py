"""What `pddbed validate` prints of a plan."""

from testbed.topology.describe import describe
from testbed.topology.document import parse_yaml
from testbed.topology.resolve import resolve
from testbed.topology.schema import TopologyFile

TEXT = """
name: all
datacenters:
  a:
    subnet: 10.1.0.0/24
    hosts:
      gw0: {role: gateway}
      p0: {role: prefill, cpu: {affinity: [0, 2], quota: 50%}}
      rld0: {role: relay-decode}
      x0: {command: iperf3 -s, publish: [5201:5201]}
      plain:
  b: {subnet: 10.2.0.0/24, fabric: {rate: 25gbit, delay: 5us}}
  c: {subnet: 10.3.0.0/24, hosts: {md0: {role: main-decode}}}
wan:
  - {name: w0, between: [a, b], rate: 400mbit, delay: 20ms}
  - {name: w1, between: [b, c], delay: 2s, driver: netem,
     forward: {loss: 1%, jitter: {std: 5ms}, duplicate: 2%},
     backward: {rate: 1mbit, queue: {bytes: 1MiB, codel: false}, loss: {good_to_bad: 1%, bad_to_good: 10%}}}
"""


def test_a_plan_is_described_with_addresses_directions_and_long_routes() -> None:
    file = TopologyFile.model_validate(parse_yaml(TEXT, "f.yaml").data)
    assert describe(resolve(file, "all", None)) == [
        'lab "all"',
        "  a: 10.1.0.0/24, router 10.1.0.1, fabric MTU 9000",
        "    gw0    10.1.0.2         gateway",
        "    p0     10.1.0.3         prefill, CPU 0, 2, 50% of a CPU",
        "    rld0   10.1.0.4         relay-decode",
        "    x0     10.1.0.5         runs iperf3 -s, port 5201 on 127.0.0.1:5201",
        "    plain  10.1.0.6         plain host",
        "  b: 10.2.0.0/24, router 10.2.0.1, fabric MTU 9000, 25gbit, 5us",
        "  c: 10.3.0.0/24, router 10.3.0.1, fabric MTU 9000",
        "    md0    10.3.0.2         main-decode",
        "  w0: a <-> b: 400mbit, 20ms, queue 2MB (40ms) each way; RTT 40ms, MTU 1500, cubic",
        "  w1: b <-> c: RTT 4s, MTU 1500, cubic, driver netem",
        "    b -> c: no rate limit, 2s, jitter 5ms normal, loss 1%, 2% duplicated",
        "    c -> b: 1mbit, 2s, bursty loss, 9.09% on average, queue 1MiB (8.39s)",
        "  a reaches c by w0 and w1: 400mbit, RTT 4.04s",
        "  c reaches a by w1 and w0: 1mbit, RTT 4.04s",
        "  OpenAI API on http://127.0.0.1:8000/v1, model tiny",
    ]
