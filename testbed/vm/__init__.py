"""A small throw-away VM that runs a command on a kernel with netem, on machines whose own kernel lacks it.

`kernel` makes what boots, `image` builds and keeps it, `job` is one command with its environment, `run` one run of
QEMU. Knows nothing of labs and links: what runs inside is any command.
"""
