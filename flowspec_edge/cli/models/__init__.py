"""``flowspec models``: list, shard, inspect, verify, train; begin at ``commands``."""
