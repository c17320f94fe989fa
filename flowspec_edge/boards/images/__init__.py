"""A Docker image as a board's software.  Begin with ``archive``, then ``launcher``, which runs on the boards."""
