"""Links that are made for an experiment: boards' links with a limited rate, and network namespaces."""
