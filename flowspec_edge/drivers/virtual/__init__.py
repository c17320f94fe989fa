"""Virtual time: a discrete-event simulation of a cluster in one process, with durations from a profile."""
