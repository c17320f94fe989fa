"""The long-running programs: ``flowspec serve``, ``draft`` and ``worker``; begin at ``service``."""
