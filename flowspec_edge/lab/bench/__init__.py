"""Benchmarks: methods × tasks × temperatures, and sweeps over one parameter; begin with ``runner``."""
