"""Continuous integration in a Vagrant VM: the shipped Vagrantfile, really booted, with the lab on kernel netem.

`machine` looks at the host, `box` builds and keeps the box, `sandbox` is the namespace in which a `run` happens,
`vagrant` is Vagrant itself as an ordinary user, `checks` is what is tried in the guest. Nothing of the host is changed
but the cache directory.
"""
