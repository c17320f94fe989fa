"""Runs methods × tasks × temperatures and checks every text; begin with ``runner``."""
