"""`cost`: which clusters the published cost and goodput can belong to. Simulated and calculated, nothing measured."""
