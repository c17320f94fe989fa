"""Rules and remedies of `flowspec doctor`, discovery for `flowspec deploy init`; begin with ``checks``."""
