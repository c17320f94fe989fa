"""Emulation: real processes over real sockets that take the time of a profile's devices."""
