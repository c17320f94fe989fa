"""A checkpoint's weights: ``located`` decides which files hold them, ``checkpoint`` reads them."""
