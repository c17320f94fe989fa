"""Messages between devices: links over ZeroMQ or in memory, encryption, and the codec."""
