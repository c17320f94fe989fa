"""Speculative Pipeline Decoding: the speculation module and its drafter."""
