"""What this machine can do for a lab, and the next step where it cannot.

`findings` holds the values and the verdict (pure), `probes` tries things out, `inside` is the program that is tried
in namespaces of its own. Changes nothing on the machine.
"""
