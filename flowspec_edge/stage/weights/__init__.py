"""Reading a model's weights: files, checkpoints, tensor names, loading into modules."""
