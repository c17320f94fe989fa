"""Block drafters: one pass from a root gives a distribution for every depth; begin with ``head``.

DFlash (arXiv 2602.06036), DSpark (2607.05147), JetSpec (2606.18394) and DFlash2 (inco.ai/blog/dflash2) differ
in the block's mask, in a head that knows the token before and in convolutions along the block; ``formats``
reads them as they are published.
"""
