"""The cluster behind an HTTP address that OpenAI's clients know how to talk to."""
