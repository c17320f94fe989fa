"""Anthropic's Messages API; in order of use: ``fields``, ``requests``, ``answers``."""
