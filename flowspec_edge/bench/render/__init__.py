"""Tables, plots and timelines of benchmark reports; begin with ``table``."""
