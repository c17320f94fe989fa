"""OpenAI's API, and the path of every request.

In order of use: ``field_table``, ``fields``, ``schemas``, ``prepare``, ``handler``, ``detokenize``, ``reasoning``,
``responses``, ``responses_endpoint``.
"""
