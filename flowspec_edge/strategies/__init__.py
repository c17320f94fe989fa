"""The systems, one file each, behind the protocol of ``base``: pure decisions, no I/O."""
