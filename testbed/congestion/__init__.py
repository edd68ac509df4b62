"""Controlled congestion: a timeline of changes, outages, cross traffic and replays, played on the WAN links of a lab.

The way of a timeline, in the order of reading:

    topology.schema   fields of an entry                    compile     entries to a Timeline, with every mistake
    traces/*          recorded traces to rates              conflicts   events that contradict, links overloaded
    timeline          the immutable runtime values          schedule    moves in the order of their times (pure)
    link_values       links before and after a change
    player            wakes at logical times                apply       does the moves, with outage and traffic/*
    triggers          serving events told to a lab          control     which timeline plays, congestion.jsonl

docs/congestion.md tells it to users.
"""
