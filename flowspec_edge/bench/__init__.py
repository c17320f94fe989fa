"""Measuring: methods on prompt sets, tables, and micro-benchmarks of single parts."""
