"""`flowspec models shard`: ``plan`` decides what each part contains, ``job`` writes it."""
