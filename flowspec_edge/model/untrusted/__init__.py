"""Processes with limits, for work on what clients and checkpoints send."""
