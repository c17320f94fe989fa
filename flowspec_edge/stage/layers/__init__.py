"""The parts of a decoder layer: attention over a tree's mask, the KV cache, the fused layer for CUDA."""
