"""This machine: Linux calls, programs, directories of our own; imports nothing of this project."""
