"""What ``bench run`` and ``demo`` share: requests, the reference, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowspec_edge.bench.prompts import Prompt
from flowspec_edge.bench.runner import Plain
from flowspec_edge.cli.options import Dtype
from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import DEMO, ModelDir
from flowspec_edge.resources import resource_dir
from flowspec_edge.runtime.request import Request
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.text import Tokenizer


def demo_prompts() -> Path:
    """The held-out prompts that come with the demonstration model."""
    return resource_dir("models") / DEMO / "prompts.jsonl"


def requests_for(tokenizer: Tokenizer, model: ModelDir, prompts: Sequence[Prompt], max_new_tokens: int,
                 sampling: Sampling, params: Params) -> list[Request]:
    """One request a prompt; UsageError names a prompt that does not fit."""
    requests = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text)
        if len(ids) + max_new_tokens > model.max_positions:
            name = f"prompt {prompt.id}" if prompt.id else "the prompt"
            raise UsageError(f"{name} has {len(ids)} tokens and {max_new_tokens} more are asked "
                             f"for, but the model stops at {model.max_positions}; lower --max-new-tokens")
        requests.append(Request(ids, max_new_tokens=max_new_tokens, sampling=sampling, params=params,
                                stop_ids=model.stop_ids))
    return requests


def plain_decoding(model: ModelDir, dtype: Dtype) -> Plain:
    """The unsharded model, one token at a time."""
    from flowspec_edge.runtime.plain import PlainDecoder

    decoder = PlainDecoder(model.path, dtype)
    return lambda r: decoder.generate(list(r.prompt), r.max_new_tokens, r.sampling, r.stop_ids)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr if that is a terminal; call the result before each of ``total`` steps."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        started = 0

        def advance(what: str) -> None:
            nonlocal started
            bar.update(task, description=what, completed=started)
            started += 1

        yield advance
