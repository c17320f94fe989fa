"""Which requests' rows and draft passes go next, and together."""
