"""``flowspec models list`` and ``fetch``: the models on this machine, and the catalogue's."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.common.listing import print_columns
from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, LM, stored_kinds
from flowspec_edge.model.opened import OpenModel, is_here, resolve_model, shipped_models

_HEADS = ", ".join(kind.name for kind in stored_kinds() if kind.choice is not None)

if TYPE_CHECKING:
    from flowspec_edge.model.catalogue import KnownModel


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List the models that come with the package, and those of the catalogue.

    `flowspec plan` knows every one of them by its name.  The other commands need it on this machine:
    flowspec models fetch NAME.
    """
    from flowspec_edge.model.catalogue import fetched_dir, known_models

    shipped = {name: resolve_model(name) for name in shipped_models()}
    known = known_models()
    if as_json:
        rows = [{"name": name, "here": True, "path": str(model.path)} for name, model in shipped.items()]
        rows += [{"name": name, "here": is_here(name), "path": str(fetched_dir(name)), "target": model.target,
                  "heads": model.heads, "published": [head.model_dump() for head in model.published]}
                 for name, model in known.items()]
        print(json.dumps(rows, indent=2))
        return
    shown: list[tuple[str, ...]] = [("name", "here", "target", "draft models")]
    shown += [(name, "yes", _describe(model), _drafts(model)) for name, model in shipped.items()]
    shown += [(name, "yes" if is_here(name) else "-", model.target,
               ", ".join(f"{kind}: {head}" for kind, head in model.heads.items()))
              for name, model in known.items()]
    print_columns(shown)


def fetch(
    name: Annotated[str, typer.Argument(help="A name of the catalogue: flowspec models list.")],
    head: Annotated[str | None, typer.Option(
        "--head", help=f"What to draft with: {_HEADS}, {LM.name} (a small model with the same "
                       "tokenizer), all, none, or the repository of a head that flowspec models head lists.  "
                       "Default: the first of these kinds that is published.  An MTP layer is in the "
                       "model itself.",
        metavar="KIND", show_default=False)] = None,
) -> None:
    """Download a model of the catalogue and its draft head from Hugging Face's hub.

    An interrupted download resumes.  Every command then knows the model by its name.  The directory is
    ~/.local/share/flowspec/models/NAME, or $FLOWSPEC_MODELS/NAME.  Some models need an account that has
    accepted their licence: hf auth login.

    Examples:

      flowspec models fetch qwen3-8b
      flowspec models fetch vicuna-13b --head all
      flowspec models fetch qwen3-8b --head lm
      flowspec models fetch qwen3-8b --head RedHatAI/Qwen3-8B-speculator.eagle3
      flowspec models shard --model qwen3-8b --stages 4 --dtype int4 --out qwen3-8b-int4
    """
    from flowspec_edge.model.catalogue import FETCHED, fetched_dir, find_known

    found = find_known(name)
    if found is None:
        raise UsageError(f"no model {name!r} in the catalogue; see: flowspec models list")
    own, model = found
    directory = fetched_dir(own)
    heads = {kind: place for kind, place in _heads(own, model, head).items() if place != model.target}
    wanted = {"target": model.target, **heads}  # an MTP layer comes with its target
    record = directory / FETCHED
    done = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    if head is None:  # a head that was chosen before stays
        wanted |= {part: done[part] for part in wanted if part in done and part != "target"}
    os.environ.pop("TQDM_DISABLE", None)  # the client's own progress bars, on a terminal
    from flowspec_edge.model.catalogue import download_to
    from flowspec_edge.util.files import make_directory, write_atomically

    make_directory(directory.parent)
    for part, repository in wanted.items():
        if done.get(part) != repository:
            place = directory / (DRAFT_KINDS[part].directory if part in DRAFT_KINDS else part)
            if part in done:  # another head's files: not complete from here on
                del done[part]
                write_atomically(record, json.dumps(done, indent=2) + "\n")
                shutil.rmtree(place, ignore_errors=True)
            print(f"{repository} -> {place}", flush=True)
            download_to(repository, place)
    write_atomically(record, json.dumps({**done, **wanted}, indent=2) + "\n")
    print(f"{own} is complete in {directory}; try it with: flowspec generate --model {own} \"Hello\", or "
          f"split it for boards with: flowspec models shard --model {own} --stages 4 --out {own}-4")


def _heads(name: str, model: KnownModel, head: str | None) -> dict[str, str]:
    if head == "none":
        return {}
    if head == "all":
        return model.heads
    if head == LM.name and model.small:
        return {head: model.small}
    kind = head or next(iter(model.heads), None)
    if kind is None:
        return {}
    if kind in model.heads:
        return {kind: model.heads[kind]}
    named = next((known for known in model.published if known.repository.lower() == kind.lower()), None)
    if named is not None and named.kind is not None:
        return {named.kind: named.repository}
    runnable = ", ".join(f"{known.repository} ({known.kind})" for known in model.runnable) or "none"
    if named is not None:
        raise UsageError(f"{named.repository} is a head in the format {named.format}, which cannot be run; "
                         f"for {name} there are: {runnable}")
    raise UsageError(f"the catalogue knows no {kind} head for {name}, only {runnable}")


def _describe(model: OpenModel) -> str:
    family = model.config.get("model_type", "unknown family")
    return f"{family}, {model.layers} layers of width {model.hidden_width}, {model.size / 1e6:.1f} MB"


def _drafts(model: OpenModel) -> str:
    return ", ".join(kind.directory for kind in model.drafts) or "none"
