"""`ttft`, `split`, `consistency`: one set of runs of a trace through a paced lab, and three reports on it."""
