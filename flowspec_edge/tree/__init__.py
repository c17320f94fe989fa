"""The draft tree and the decisions on it: numpy only, no sockets, clocks or models."""
