"""Which board drafts, which boards are stages, and how many layers each holds; begin with ``planner``."""
