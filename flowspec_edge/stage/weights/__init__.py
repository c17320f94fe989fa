"""Loading a model's weights into modules: the names that a model needs, and the loader."""
