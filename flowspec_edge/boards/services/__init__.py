"""Status, control, keys and client of the deployed services.  Begin with ``status``."""
