"""Packets of a running lab as pcapng files (`pddbed capture`), and what they say against the workers' byte counters
(`pddbed audit`). Recording: points, session, recorder, ring, pcapng. Reading: packets, stream, flows, compare.
"""
