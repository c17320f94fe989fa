"""Draft models: they turn committed text and tree nodes into ranked children."""
