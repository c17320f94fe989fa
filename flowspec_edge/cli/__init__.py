"""The ``flowspec`` command: commands check options, call the packages and show results; begin at ``main``."""
