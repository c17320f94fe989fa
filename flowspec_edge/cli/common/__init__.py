"""What several groups of commands share: options, defaults, clusters, requests; begin at ``options``."""
