"""Links between boards: addresses, measurement, traffic shaping, namespaces.  Begin with ``linktest``."""
