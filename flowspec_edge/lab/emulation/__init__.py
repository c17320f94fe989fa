"""Emulation: real processes over real sockets that take the time of a profile's devices.

``emulator`` is what a cluster is given, ``process`` the program of its stages.
"""
