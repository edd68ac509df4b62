"""`handoff`: recomputing a hand-over's tokens against streaming their KV, on a calm and on a congested WAN."""
