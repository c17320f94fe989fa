"""Copies a sharded model's parts to the boards over ssh, resumable and durable.  Begin with ``push``."""
