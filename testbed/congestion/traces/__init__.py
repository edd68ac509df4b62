"""Recorded bandwidth traces: reading them with every mistake on its line (`read`), and what they come to (`trace`)."""
