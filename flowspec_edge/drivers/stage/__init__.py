"""A verification device's process: one layer shard, one loop."""
