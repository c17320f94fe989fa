"""``flowspec deploy`` and ``flowspec keys``: a cluster of boards; begin at ``commands``."""
