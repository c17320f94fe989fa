"""Figures of benchmark runs and their JSON files; begin with ``rows`` and ``report``."""
