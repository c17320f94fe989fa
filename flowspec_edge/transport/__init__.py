"""Messages between devices: links over ZeroMQ, encryption, and the codec."""
