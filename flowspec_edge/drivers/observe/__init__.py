"""What listens to a cluster: traces, counters, power.  ``d0.run_events`` lists the events."""
