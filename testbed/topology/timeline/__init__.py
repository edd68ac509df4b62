"""Entries of `congestion:` in a file, as a timeline with every mistake in it."""
