"""What listens to a cluster: traces, counters, power.  ``d0.observer`` defines the events."""
