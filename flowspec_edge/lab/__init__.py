"""The laboratory: measurements, training and imitations; nothing that a board runs imports it."""
