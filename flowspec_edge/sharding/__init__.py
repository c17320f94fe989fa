"""Cutting a checkpoint into the parts that devices load; see ``flowspec_edge.manifest`` for the result."""
