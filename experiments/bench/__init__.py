"""`pddbed bench`: requests from a trace or a recipe to a gateway, measured at the client as `vllm bench serve` does.

options, load, synthetic, arrivals   what is asked, and when     bodies        the requests' JSON
client, outcome, drive      asking, and what came back           run, session  one run against one server
metrics, goodput, notes, table     what it comes to              kept, experiment   a run's directory, and its report
"""
