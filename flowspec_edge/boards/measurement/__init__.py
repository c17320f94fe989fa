"""Measures a board's profile: stages, draft passes, lm_head, memory and links; begin with ``profile``."""
