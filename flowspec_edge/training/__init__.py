"""Training: the demonstration models from nothing, and draft parts for any model that is there.

Knows torch and transformers; knows nothing of the pipeline, its tree or its strategies.
"""
