"""The network and the lab: topology, links, hosts, lifecycle, command line. Knows nothing of models."""
