"""`flowspec deploy`: brings a release to all boards of a cluster, or takes it back.

Begin with ``diff.make_diff``, the decision, and ``rollout.Rollout``, its execution.
"""
