"""Reads boards' states and runs actions on them.  Begin with ``desired_state``."""
