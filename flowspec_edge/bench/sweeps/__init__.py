"""Runs one benchmark at several values of one parameter; begin with ``sweep``."""
