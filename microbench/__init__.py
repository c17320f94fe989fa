"""Micro-benchmarks, one module each; see README.md.  Not part of the installed package."""
