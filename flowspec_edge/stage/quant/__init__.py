"""4-bit weights: quantisation schemes, their linear layers, and the import of AWQ and GPTQ checkpoints."""
