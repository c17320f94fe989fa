"""One question to a board over ssh, and the checks of its answer; begin with ``facts``, ``checks.CHECKS``."""
