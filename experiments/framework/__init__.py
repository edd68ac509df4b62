"""Machinery of all experiments: labs, run directories, parts that can be resumed, figures and their verdicts."""
