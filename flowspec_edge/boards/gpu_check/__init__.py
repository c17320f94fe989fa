"""Whether a device computes products, operations and a model's tokens correctly; begin with ``report``."""
