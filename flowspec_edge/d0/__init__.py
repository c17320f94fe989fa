"""The draft device: requests, their sessions, and which rows and draft passes go next.

Begin with ``events``, what drivers and the core say to each other, and ``request_state``; then ``core``.
"""
