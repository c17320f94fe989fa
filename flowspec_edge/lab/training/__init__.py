"""Training of draft models for an existing target; start with ``train_head`` and ``loop``."""
