"""Ollama's API; in order of use: ``fields``, ``requests``, ``answers``, ``model_card``."""
