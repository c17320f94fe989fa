"""Boards before deployment: ``flowspec device``, ``doctor`` and ``plan``; each command has its file."""
