"""Claude Code, unmodified, against Anthropic's door: ``make soak``, where its command is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kits.http_server import NAME, Running, Says
from kits.process_clusters import PATIENCE

COMMAND = shutil.which("claude")
pytestmark = [pytest.mark.soak, pytest.mark.skipif(COMMAND is None, reason="no command claude here")]


def test_an_answer(server: Running, cluster: Says, tmp_path: Path) -> None:
    """It names a limit of its own, beyond this model's context. Its home is empty, so it knows no other server."""
    cluster.text = "A pipeline is a row of stages."
    assert COMMAND
    said = subprocess.run(
        [COMMAND, "-p", "What is a pipeline?", "--system-prompt", "be brief", "--tools", "", "--output-format", "json"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ANTHROPIC_BASE_URL": server.url,
             "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": NAME, "ANTHROPIC_DEFAULT_HAIKU_MODEL": NAME,
             "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False)
    answer = json.loads(said.stdout)
    assert (answer["result"], answer["is_error"]) == (cluster.text, False)
