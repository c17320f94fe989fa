"""The draft tree and all that is decided on it; numpy only, no sockets, clocks or models."""
