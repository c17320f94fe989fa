"""Speculative Pipeline Decoding: a strategy and a kind of draft model from outside.

The rest of the package does not know it: its strategy (``strategy``) and its kind (``kind``) come by the entry
points of pyproject.toml, as those of any other package.  A record of the kind names the module that reads and
runs it (``drafter``, over ``module``); ``training`` makes one for a model.
"""
