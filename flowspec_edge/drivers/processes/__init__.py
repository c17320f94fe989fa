"""D0's side of a cluster of processes; ``process_cluster`` is the entry point."""
