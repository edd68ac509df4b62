"""This machine: namespaces, programs, directories of our own; knows nothing of labs."""
