"""Controlled congestion: a timeline of changes, outages, cross traffic and replays, played on the WAN links of a lab.

The way of a timeline, in ten files:

    topology.schema   what an entry may contain             compile     entries to a Timeline, with every mistake
    traces/*          recorded traces to rates              conflicts   what cannot hold together
    timeline, change  the immutable runtime values          agenda      what is due when (pure)
    player            wakes at logical times and applies    gate, traffic_pool, triggers, diary   what it applies with

docs/congestion.md tells it to users.
"""
