"""The parts of a decoder layer: attention over a tree's mask, and what layers remember."""
