"""Drivers of a generation: D0's coordinator, stage processes over ZeroMQ, and a simulator in virtual time."""
