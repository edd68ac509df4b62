"""The published figures, reproduced: traces, one package per experiment, the run directory and the report.

Drives `testbed` and `workers` through their public interfaces; neither knows of this package.
"""
