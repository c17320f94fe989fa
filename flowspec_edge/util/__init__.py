"""Independent helpers: files, TOML, /proc, tensors and torch devices."""
