"""Tables and figures of the papers from measurements, in the formats of a paper; begin at ``catalogue``."""
