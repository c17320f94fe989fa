"""Observation of a running cluster, in real and virtual time; ``observer`` defines the events."""
