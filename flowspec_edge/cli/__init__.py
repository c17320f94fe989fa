"""The command line: thin.  Reads arguments, calls the rest, prints."""
