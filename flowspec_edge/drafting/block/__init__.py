"""Block drafters: one pass from a root gives a distribution for every depth; begin with ``head``.

DFlash (arXiv 2602.06036), DSpark (2607.05147) and JetSpec (2606.18394) differ in the block's mask and in a
head that knows the token before; ``formats`` reads them as they are published.
"""
