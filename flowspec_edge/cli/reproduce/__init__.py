"""``flowspec reproduce``: tables and figures of the papers; begin at ``command``."""
