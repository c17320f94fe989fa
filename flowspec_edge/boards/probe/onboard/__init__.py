"""The probe: what a board's own Python runs to answer a question; begin with ``tools.answer``.

``probe.facts`` sends these modules.  They need only the standard library and Python 3.8, so that a bare board
can answer, and a Python that is too old is reported.  A module with a function ``facts`` is a section.
"""
