"""GGUF files as models: ``files`` finds them, ``header`` reads one, ``home`` makes a model's directory of it.

That directory has config.json, the tokenizer and a table of the tensors (``weights.gguf_file``), which reads them
from the GGUF file itself.  So everything else sees a checkpoint like any other.
"""
