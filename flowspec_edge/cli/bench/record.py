"""``flowspec record``: what a model and its draft head say, in a file with which virtual time needs no weights."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowspec_edge.cli.common.options import (
    MOST_REPEATS,
    MOST_TOKENS,
    OUTPUT,
    BoardModelOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, NGRAM
from flowspec_edge.model.opened import DEMO

if TYPE_CHECKING:
    from flowspec_edge.cli.common.options import Dtype
    from flowspec_edge.d0.request import ClusterBackend
    from flowspec_edge.drivers.virtual.recording import Recording
    from flowspec_edge.lab.record import TextToRecord
    from flowspec_edge.model.opened import OpenModel

_MOST_NODES, _MOST_CHILDREN = 4096, 64


def record(
    out: Annotated[Path, typer.Option(
        "--out", help="The recording.  Finished texts are kept in OUT.work until it is complete, so a run that broke "
                      "off continues.", metavar="FILE", rich_help_panel=OUTPUT)],
    model: ModelOption = DEMO,
    prompts: Annotated[list[Path] | None, typer.Option(
        "--prompts", help="JSONL with prompt or turns; may be given several times.  Default: the demonstration's, with "
                          "--chat the 24 questions of smollm2-135m.", metavar="F.jsonl", show_default=False)] = None,
    chat: Annotated[bool, typer.Option(
        "--chat", help="The prompts are questions: apply the model's chat template.")] = False,
    limit: Annotated[int | None, typer.Option(
        "--limit", min=1, max=MOST_REPEATS, metavar="N",
        help="Maximum prompts of a file: its first N.  Default: all.")] = None,
    truncate: Annotated[int | None, typer.Option(
        "--truncate", min=1, max=MOST_TOKENS, metavar="N",
        help="Maximum tokens of a prompt: its last N.  Default: all.")] = None,
    temperatures: Annotated[str, typer.Option(
        "--temperatures", help="Each prompt is answered at each of these.", metavar="T,T")] = "0,1",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of sampled answers.", metavar="N")] = 0,
    max_new_tokens: Annotated[int, typer.Option(
        "--max-new-tokens", min=1, max=MOST_TOKENS, help="Maximum tokens of an answer.", metavar="N")] = 64,
    draft: Annotated[str, typer.Option(
        "--draft", help="The kind of head, such as eagle3.  Default: eagle2, or the one that the model has.",
        metavar="KIND", show_default=False)] = "",
    nodes: Annotated[int, typer.Option(
        "--nodes", min=1, max=_MOST_NODES, help="Nodes of the draft tree that are recorded at every token: the "
                                                "likeliest.", metavar="N")] = 128,
    children: Annotated[int, typer.Option(
        "--children", min=1, max=_MOST_CHILDREN, help="Children of each node.", metavar="N")] = 11,
    licence: Annotated[str, typer.Option(
        "--licence", help="What to write into the file about the texts' licence.", metavar="TEXT")] = "",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    cluster: Annotated[Path | None, typer.Option(
        "--cluster", help="Let the boards of this cluster.toml answer.  This machine must be the draft device.",
        metavar="FILE", show_default=False)] = None,
    board_model: BoardModelOption = None,
) -> None:
    """Record a model's answers and drafts: then any cluster is measured in seconds, without weights.

    The file has texts, and what the draft head would draft at each of their tokens.  bench run, bench tables, sweep,
    plan and reproduce take it with --recording in place of a model.  So a large model is recorded once, on a machine
    with a GPU, and the file is handed on.

    Examples:

      flowspec record --out demo.flowrec --limit 4
      flowspec record --model smollm2-135m --chat --out smollm2.flowrec
      flowspec record --model ./Qwen3-32B --draft eagle3 --prompts mt_bench.jsonl --chat --out qwen3-32b.flowrec
      flowspec record --cluster cluster.toml --model qwen3-32b --chat --temperatures 0 --out boards.flowrec
    """
    from flowspec_edge.cli.bench.options import parse_temperatures
    from flowspec_edge.cli.common.options import device_of, dtype_of
    from flowspec_edge.cli.common.progress import progress
    from flowspec_edge.model.opened import resolve_model
    from flowspec_edge.sampling.settings import Sampling
    from flowspec_edge.strategies.draft_choice import draft_kind, require_draft
    from flowspec_edge.strategies.parameters import Parameters
    from flowspec_edge.strategies.params import Params
    from flowspec_edge.strategies.registry import strategy_class
    from flowspec_edge.util.files import check_writable

    open_model = resolve_model(model)
    check_writable(out)
    temperature_list = parse_temperatures(temperatures, Sampling())
    params = replace(Params(), draft=draft) if draft else Params()
    strategy = strategy_class("flowspec")
    require_draft(strategy, params, open_model)
    kind = draft_kind(strategy, params, open_model)
    if kind is None or kind == NGRAM.name or DRAFT_KINDS[kind].is_block or DRAFT_KINDS[kind].bound:
        raise UsageError(f"--draft {kind} has no tree below every token to record: record an EAGLE head, an MTP "
                         "layer or a small model; n-grams need no recording")
    element_type = dtype_of(open_model, dtype)
    device = device_of(device, open_model, element_type) if cluster is None else "cpu"
    texts = _prompts(open_model, prompts, chat, limit, truncate, temperature_list, seed, max_new_tokens,
                     replace(params, draft=kind))

    from flowspec_edge.lab.record import Budget
    from flowspec_edge.lab.record import record as record_texts

    about = _about(open_model, kind, element_type, licence, texts, Parameters())
    work = out.with_name(f"{out.name}.work")
    with _opened(open_model, element_type, device, cluster, board_model) as backend, progress(
            len(texts), "record", "texts") as advance:
        recording = record_texts(backend, texts, about, Budget(nodes, children), work, advance)
    recording.save(out)
    for path in work.glob("*.flowrec"):
        path.unlink()
    work.rmdir()
    print(f"{out}: {len(recording.texts)} answers of {open_model.display_path}, {recording.positions} tokens, "
          f"{recording.nodes:,} nodes, {out.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    if empty := len(texts) - len(recording.texts):
        print(f"flowspec: note: {empty} of {len(texts)} answers are left out: they, or their prompts' answers at "
              "another temperature, ended before the first token", file=sys.stderr)
    print(f"Next: flowspec bench run --recording {out}", file=sys.stderr)


def _prompts(model: OpenModel, files: list[Path] | None, chat: bool, limit: int | None, truncate: int | None,
             temperatures: list[float], seed: int, max_new_tokens: int, params: Any) -> list[TextToRecord]:
    """Return every prompt at every temperature; a prompt's category is its task, else its file."""
    from flowspec_edge.cli.common.workload import chat_questions, demo_prompts, requests_for
    from flowspec_edge.lab.bench.tasks import load_tasks
    from flowspec_edge.lab.record import TextToRecord
    from flowspec_edge.model.text import Tokenizer
    from flowspec_edge.sampling.settings import Sampling

    tokenizer = Tokenizer(model)
    if chat and not tokenizer.chats:
        raise UsageError(f"{model.display_path} has no chat template: leave --chat out, or take a model that has one")
    tasks = load_tasks(files or [chat_questions() if chat else demo_prompts()], limit=limit)
    texts = []
    for temperature in temperatures:
        for task in tasks:
            requests = requests_for(tokenizer, model, task.prompts, max_new_tokens,
                                    Sampling(temperature, seed=seed if temperature else 0), params, truncate,
                                    "lower --max-new-tokens, or take the end of long prompts with --truncate N", chat)
            texts += [TextToRecord(prompt.category or task.name, prompt.id, request)
                      for prompt, request in zip(task.prompts, requests, strict=True)]
    return texts


def _about(model: OpenModel, kind: str, dtype: str, licence: str, prompts: list[TextToRecord], ranking: Any
           ) -> Recording:
    """Return the recording without texts: what made it."""
    import hashlib
    import json

    from flowspec_edge import __version__
    from flowspec_edge.drivers.virtual.recording import Recording

    prompts_json = json.dumps([list(prompt.request.prompt) for prompt in prompts])
    stops = sorted({stop for prompt in prompts for stop in prompt.request.stop_ids})
    provenance = {"program": f"flowspec-edge {__version__}", "dtype": dtype, "licence": licence,
                  "prompts": hashlib.sha256(prompts_json.encode()).hexdigest(), "digest": _digest(model),
                  "head": _digest(model, kind)}
    return Recording(model.name, model.layers, model.decoder.vocab_size, frozenset(stops), kind,
                     ranking.rank, ranking.tau, (), provenance)


def _digest(model: OpenModel, kind: str | None = None) -> str:
    """Hash the target's stored tensors, or the bytes of a head's files."""
    import hashlib

    if kind is None:
        checkpoint = model.checkpoint()
        return str(checkpoint.digest(sorted(checkpoint.names)))
    path = model.draft(kind)
    files = sorted(path.glob("*.safetensors")) if path else []
    sha = hashlib.sha256()
    for file in files:
        sha.update(file.read_bytes())
    return sha.hexdigest()


def _opened(model: OpenModel, dtype: Dtype, device: str, cluster: Path | None, board_model: str | None
            ) -> AbstractContextManager[ClusterBackend]:
    """Open the boards of a cluster file; without one, run the model in this process.

    The process runs in virtual time, because its own time does not matter.
    """
    from flowspec_edge.drivers.processes.clusters import open_cluster
    from flowspec_edge.drivers.processes.spec import ClusterSpec

    if cluster is None:
        from flowspec_edge.device_profile import load_profile
        from flowspec_edge.drivers.virtual.place import Virtual

        stages = model.manifest.stages if model.manifest else 1
        return nullcontext(open_cluster(ClusterSpec(model.path, stages, dtype, device=device),
                                        Virtual(load_profile("paper-7b"))))
    from flowspec_edge.boards.inventory import load_inventory
    from flowspec_edge.boards.ssh_stages import SshBoards

    inventory = load_inventory(cluster)
    backend = SshBoards(inventory, board_model or str(model.path.resolve()), dtype)
    return open_cluster(ClusterSpec(model.path, len(inventory.verify), dtype, device=backend.device), backend)
