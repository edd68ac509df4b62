"""The commands of `pddbed` that concern workers, one command or group a file."""
