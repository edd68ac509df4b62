"""An examination of this machine: whether it can raise a lab, and the next step where it cannot.

`examination` tries things out and gives the verdict, `namespaces` is the program that it runs in namespaces of its own.
Changes nothing on the machine.
"""
