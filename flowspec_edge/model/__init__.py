"""A model as its directory describes it, without torch.  Start with ``opened``."""
