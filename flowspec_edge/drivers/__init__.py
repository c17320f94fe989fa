"""What runs a generation: D0, its stages as processes over ZeroMQ, and both in virtual time."""
