"""A small throw-away VM that runs a command on a kernel with netem, on machines whose own kernel lacks it.

`image` builds and keeps the kernel and the initramfs, `job` is one command with its environment, `qemu` the
command line, `run` the process. Knows nothing of labs and links: what runs inside is any command.
"""
