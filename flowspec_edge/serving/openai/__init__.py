"""OpenAI's API; in order of use: ``schemas``, ``prepare``, ``handler``, ``detokenize``, ``responses``."""
