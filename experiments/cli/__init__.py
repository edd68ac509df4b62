"""`pddbed trace`, `pddbed experiment` and `pddbed report`: thin commands over this package."""
