"""The release of a stage's service, named by the link ``current`` in the path of its configuration."""

from __future__ import annotations

from pathlib import Path

_MARK = "unsettled"  # as in flowspec-verify@.service


class ReleaseLink:
    """The link to the release that the process began with.

    ``config``: HOME/current/etc/FILE, as the process was started with it.
    """

    def __init__(self, config: Path) -> None:
        self._config = config
        self._began = config.resolve()
        self._mark = config.absolute().parent.parent.parent / _MARK

    @property
    def moved(self) -> bool:
        """Whether a restart brings another release."""
        return self._config.resolve() != self._began

    @property
    def is_open(self) -> bool:
        """Whether a restart may bring another release: a rollout has begun and not ended."""
        return self.moved or self._mark.exists()
