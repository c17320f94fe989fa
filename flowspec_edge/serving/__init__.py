"""HTTP serving on top of a cluster: OpenAI's API, metrics and a live page; ``app`` has the routes."""
