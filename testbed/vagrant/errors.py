"""The one exception of this package: a sentence for the person at the terminal."""


class VagrantError(Exception):
    """The VM cannot be built, started or used; the message says what is wrong and what to do next."""
