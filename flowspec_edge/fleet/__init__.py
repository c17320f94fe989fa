"""Boards: what each can do, who takes which layers, and the networks between them."""
