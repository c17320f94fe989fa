"""One probe of a board over ssh, and the rules on what it finds; begin with ``facts``."""
