"""The boards: probing, profiling, planning, networks and deployment.  Begin with ``inventory``."""
