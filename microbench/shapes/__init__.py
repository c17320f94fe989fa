"""Times a stage and D0 at the shapes of real models, with random weights; begin with ``__main__``."""
