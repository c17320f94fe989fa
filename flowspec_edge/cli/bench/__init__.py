"""``flowspec bench``: strategies on prompt sets, tables, figures; begin at ``commands``."""
