"""Commands on one board: on this machine or over ssh.  Begin with ``ssh.runner_for``."""
