"""`python -m testbed.congestion.traffic`: the first line of standard input says what to be (`messages`)."""

import os
import sys
from contextlib import suppress

from testbed.congestion.traffic.messages import Begin, BeReceiver, Listening, Order, Ready, line_of, read_line
from workers.linux import set_timer_slack

_NICE = -10  # others' traffic would not wait for this machine's workers


def main() -> None:
    set_timer_slack()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    try:
        wanted: Order = read_line(sys.stdin.readline(), Order)  # type: ignore[arg-type]
    except ValueError as error:
        sys.exit(f"cross traffic: {error}")
    if isinstance(wanted, BeReceiver):
        from testbed.congestion.traffic.receive import Receiver

        receiver = Receiver(wanted.protocol, wanted.address, wanted.flows)
        _say(Listening(receiver.port))
        _say(receiver.run())
        return
    from testbed.congestion.traffic.send import make_flows, send

    flows = make_flows(wanted)
    _say(Ready())
    line = sys.stdin.readline()
    if line.strip():
        _say(send(flows, read_line(line, Begin).start_ns, wanted.duration_ns))


def _say(message: object) -> None:
    sys.stdout.write(line_of(message))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
