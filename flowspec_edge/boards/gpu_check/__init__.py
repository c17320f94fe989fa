"""What a device computes, as facts for checks; begin with ``computations``, then ``probe.checks``."""
