"""Packets of a running lab as pcapng files (`pddbed capture`), and audits of them against the workers' byte counters.

Recording: `capture_points`, `run`, `recorder`, `ring`, `pcapng`. Reading: `packets`, `tcp`, `tallies`, `counters`,
`audit`.
"""
