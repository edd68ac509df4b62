"""Cross traffic as it is sent and received: two small processes a source, one in each end host of a link.

`python -m testbed.congestion.traffic` reads what to be from its standard input, one JSON object a line, and answers
on its standard output. Uses the standard library only, to start fast; knows no lab.
"""
