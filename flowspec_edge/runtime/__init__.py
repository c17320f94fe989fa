"""Drivers: D0's coordinator, stage processes over ZeroMQ, and virtual time."""
