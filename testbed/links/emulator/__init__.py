"""The emulator: one process that is the WAN between two TUN devices, where the kernel has no netem.

A packet's way, file by file: `loop` reads it from one TUN, `packet` measures it in MTU segments, `lane` hands it
to the `bottleneck` (rate, queue, `codel`) and to the `wire` (loss and the like from `chance`, `jitter`), it waits
in the `delayline`, and `loop` writes it to the other TUN when its logical departure time has come.
`control` answers the lab, `memory` bounds what may be in flight, `__main__` is the process's set-up.

Imports here stay light (no pyroute2, no numpy): the process must be up within 0.2 s.
"""
