"""OpenAI's API; in order of use: ``schemas``, ``prepare``, ``handler``, ``choice``, ``responses``,
``responses_endpoint``."""
