"""The boards: probing, measurement, planning, links and deployment.  Begin with ``inventory``."""
