"""Messages on the wire: the codec, links over ZeroMQ and in memory, keys."""
