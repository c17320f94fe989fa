"""The draft device: requests, their sessions, and which rows and draft passes go next.  Begin with ``core``."""
