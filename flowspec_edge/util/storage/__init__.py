"""Reading large files past the page cache; files of weights."""
