"""A server that speaks as much of the Hugging Face hub's protocol as its client asks for; and commands."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


def commit_of(name: str) -> str:
    """The id of a repository's only commit: the client may remember what it read of one."""
    return hashlib.sha1(name.encode()).hexdigest()


@contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers what the client of the Hugging Face hub asks; its address, and what was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            asked.append(path)
            for name, home in repositories.items():
                commit = commit_of(name)
                files = sorted(p.relative_to(home).as_posix() for p in home.rglob("*") if p.is_file())
                if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main",
                            f"/api/models/{name}/revision/{commit}"):
                    return self.json({"id": name, "sha": commit,
                                      "siblings": [{"rfilename": f} for f in files]})
                if path in (f"/api/models/{name}/tree/{commit}", f"/api/models/{name}/tree/main"):
                    return self.json([{"type": "file", "path": f, "oid": self.etag(home / f),
                                       "size": (home / f).stat().st_size} for f in files])
                for prefix in (f"/{name}/resolve/{commit}/", f"/{name}/resolve/main/"):
                    if path.startswith(prefix) and path.removeprefix(prefix) in files:
                        return self.file(home / path.removeprefix(prefix), commit)
            return self.say(b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, 404)

        do_HEAD = do_GET

        def json(self, content: object) -> None:
            self.say(json.dumps(content).encode(), {"Content-Type": "application/json"})

        def file(self, path: Path, commit: str) -> None:
            self.say(path.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{self.etag(path)}"'})

        def etag(self, path: Path) -> str:
            return hashlib.sha1(path.read_bytes()).hexdigest()

        def say(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Runs the commands that it is told, and tells what came of each.
_COMMANDS = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from flowspec_edge.cli.main import main
for line in sys.stdin:
    models, arguments = json.loads(line)
    os.environ["FLOWSPEC_MODELS"] = models
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class Commands:
    """Commands in one other process: the hub's client reads its environment once."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _COMMANDS], text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, env={**os.environ, **environment})

    def flowspec(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        given, taken = self._process.stdin, self._process.stdout
        assert given is not None
        assert taken is not None
        print(json.dumps([os.environ["FLOWSPEC_MODELS"], [*map(str, arguments)]]), file=given, flush=True)
        code, out, err = json.loads(taken.readline())
        return code, out, err

    def close(self) -> None:
        with self._process:
            pass


class Hub(Commands):
    """A hub, and commands that see it."""

    def __init__(self, cache: Path) -> None:
        self.repositories: dict[str, Path] = {}
        with ExitStack() as opened:
            address, self.asked = opened.enter_context(hub(self.repositories))
            self.environment = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache)}
            super().__init__(**self.environment)
            self._opened = opened.pop_all()

    def close(self) -> None:
        super().close()
        self._opened.close()
