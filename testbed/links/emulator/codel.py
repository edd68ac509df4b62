"""CoDel (RFC 8289): drops from the head of the queue when packets have waited too long for too long. Pure.

Follows include/net/codel_impl.h; one call decides about one packet at the head.
"""

from math import isqrt

from testbed.model.impairment import CoDel

_NEVER = -1


class CoDelState:
    def __init__(self, parameters: CoDel) -> None:
        self.parameters = parameters
        self._first_above = _NEVER  # when the wait will have been too long for a whole interval
        self._dropping = False
        self._drop_next = 0
        self._count = 0
        self._last_count = 0
        self._largest_packet = 0

    def drops(self, waited_ns: int, packet_bytes: int, waiting_bytes: int, now: int) -> bool:
        """Is the packet at the head dropped at `now`? If so, ask about the one behind it with the same `now`.

        `waiting_bytes` is what the queue holds behind this packet.
        """
        self._largest_packet = max(self._largest_packet, packet_bytes)
        if not self._too_long(waited_ns, waiting_bytes, now):
            self._dropping = False
            return False
        interval = self.parameters.interval_ns
        if self._dropping:
            if now < self._drop_next:
                return False
            self._count += 1
            self._drop_next = _control_law(self._drop_next, interval, self._count)
            return True
        self._dropping = True
        since = self._count - self._last_count
        # Back soon after the last time: go on near the rate of drops that was right then.
        self._count = since if since > 1 and now - self._drop_next < 16 * interval else 1
        self._last_count = self._count
        self._drop_next = _control_law(now, interval, self._count)
        return True

    def emptied(self) -> None:
        """The queue ran empty."""
        self._dropping = False
        self._first_above = _NEVER

    def _too_long(self, waited_ns: int, waiting_bytes: int, now: int) -> bool:
        if waited_ns < self.parameters.target_ns or waiting_bytes <= self._largest_packet:
            self._first_above = _NEVER
            return False
        if self._first_above == _NEVER:
            self._first_above = now + self.parameters.interval_ns
            return False
        return now >= self._first_above


def _control_law(t: int, interval: int, count: int) -> int:
    """The next drop comes interval / sqrt(count) after `t`."""
    return t + (interval << 16) // isqrt(count << 32)
