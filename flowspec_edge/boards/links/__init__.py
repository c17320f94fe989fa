"""Links between boards: addresses, and their measurement.  Begin with ``linktest``."""
