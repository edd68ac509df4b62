"""Workers: model, cache, wire, roles and gateway. Knows nothing of Mininet: a worker is a process with
addresses.
"""
