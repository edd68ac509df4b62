"""The one exception of the VM harness: a sentence for the person at the terminal."""


class VmError(Exception):
    """The VM cannot be built or started; the message says what is missing and what to do next."""
