"""`skew`: the publication's KV transfer times by hit rate: 248 ms against 1210 ms at the median, 1682 ms queueing."""
