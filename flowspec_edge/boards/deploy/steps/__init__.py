"""The steps on one board: pure functions from desired state and facts to shell commands.

Begin with ``phases.decide``.  A step without commands has nothing to do.
"""
