"""Recorded traces, as they stand in files of several formats."""
