"""Choosing the next token: ``rule`` is the definition in numpy, ``sampler`` its equivalent in torch."""
