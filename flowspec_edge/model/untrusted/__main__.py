"""The program of :mod:`flowspec_edge.model.untrusted.processes`.

It does jobs from its standard input, a socket, until that closes. It imports neither torch nor transformers: it
starts
in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_MAX_REASON = 2000  # characters
_PAGE = resource.getpagesize()

Job = Callable[[dict[str, Any]], str]  # raises any exception if it fails


def _grammar_job() -> Job:
    """Make the job that compiles a grammar and computes its first mask, or that reads a JSON schema.

    ``lark``, ``gbnf``, ``limits`` and ``forced``: a grammar.  ``gbnf``: whether it is in llama.cpp's syntax; then
    it is
    converted, which is the result. ``forced``: the most bytes that it may begin with without a choice.

    ``schema`` and ``limits``: the result is JSON, of :func:`enforceable`, or null if the schema can be
    enforced as it is.
    """
    import llguidance
    from llguidance.gbnf_to_lark import gbnf_to_lark

    from flowspec_edge.model.untrusted.schemas import enforceable

    tokenizer = llguidance.LLTokenizer("byte")

    def compiled(job: dict[str, Any]) -> str:
        limits = llguidance.LLParserLimits(**job["limits"])
        if "schema" in job:
            options = {"x-guidance": job["schema"]["x-guidance"]}

            def fails(schema: Any) -> str:
                lark = f"start: %json {json.dumps({**schema, **options})}"
                matcher = llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=limits)
                return str(matcher.get_error()) if matcher.is_error() else ""

            return json.dumps(enforceable(job["schema"], fails) if fails(job["schema"]) else None)
        lark = gbnf_to_lark(job["lark"]) if job["gbnf"] else job["lark"]
        matcher = llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=limits)
        if not matcher.is_error() and len(matcher.compute_ff_bytes()) > job["forced"]:
            raise ValueError(f"it fixes more than {job['forced']} bytes of the answer")
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lark if job["gbnf"] else ""

    return compiled


def _template_job() -> Job:
    """Make the job that renders a chat template, as transformers does in ``render_jinja_template``.

    ``template`` and ``context``: what it renders, and with what.
    """
    from datetime import datetime

    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tag ``{% generation %}``, which marks an assistant's text for training; here it is plain text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Callable[[], str]) -> str:
            return caller()

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    compiled = lru_cache(4)(environment.from_string)
    return lambda job: compiled(job["template"]).render(job["context"])


JOBS: dict[str, Callable[[], Job]] = {"grammar": _grammar_job, "template": _template_job}


def main() -> None:
    kind, limits_json = sys.argv[1:]
    limits = json.loads(limits_json)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (limits["stack"], limits["stack"]))
    do = JOBS[kind]()
    most = _address_space() + limits["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with socket.socket(fileno=0) as peer, peer.makefile("rb") as jobs:
        while size := jobs.read(8):
            data = jobs.read(int.from_bytes(size, "big"))
            # The signal's default action ends the process, whatever native code it is in.
            signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
            try:
                text = json.dumps(_reply(do, data, most - limits["memory"] // 2)).encode()
            except MemoryError:
                os.kill(os.getpid(), signal.SIGABRT)  # as native code ends that cannot allocate
            signal.setitimer(signal.ITIMER_PROF, 0)
            peer.sendall(len(text).to_bytes(8, "big") + text)


def _reply(do: Job, data: bytes, usual: int) -> dict[str, Any]:
    """Do the job, and return its result or its error.

    The process is reusable only while its address space is below ``usual`` bytes: what a large job leaves behind would
    count as the next job's.
    """
    result = error = None
    try:
        result = do(json.loads(data))
    except MemoryError:
        raise
    except Exception as failure:
        error = str(failure)[:_MAX_REASON] or type(failure).__name__
    return {"result": result, "error": error, "reusable": _address_space() < usual}


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * _PAGE


if __name__ == "__main__":
    main()
