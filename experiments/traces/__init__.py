"""Request traces: public formats read, traces generated, statistics, prompts in which equal block ids are equal tokens.

Everything is checked when a trace is read, with the file and line of the first mistake, before anything starts.
"""

from experiments.traces.trace import Request, Trace, TraceError

__all__ = ["Request", "Trace", "TraceError"]
