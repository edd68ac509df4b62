"""A deployment at full scale, simulated: prefill, connection pool, relay and main decode as queues and times.

Owns no policy: routes and hand-over are `workers.policy` and `workers.handover`, caches are `workers.cache.policy`.
Touches no clock, socket or process; the same trace, deployment and policy give the same outcome everywhere.
"""
