"""Link measurement, traffic shaping and network namespaces.  Begin with ``linktest`` or ``tc``."""
