"""The relay: one process that is the WAN between two TUN devices, where the kernel has no netem.

A packet's way, file by file: `loop` reads it from one TUN, `packet` measures it in MTU segments, `lane`
hands it to the `bottleneck` (rate and queue) and to the `delayline`, and `loop` writes it to the other TUN
when its logical departure time comes. `control` answers the lab; `__main__` is the process's set-up.

Imports here stay light (no pyroute2, no numpy): the process must be up within 0.2 s.
"""
