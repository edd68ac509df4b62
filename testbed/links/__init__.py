"""WAN links: one interface (`base`), two drivers (`netem` in the kernel, `userspace` as a relay process)."""
