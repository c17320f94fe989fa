"""The record of a kind of draft models.

A package offers a kind of its own under the entry points "flowspec.draft_kinds", by the kind's name.  Commands
import a record for their lists, so its module must not need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by their authors' names


@dataclass(frozen=True)
class DraftKind:
    """One kind of draft model.

    directory       in the directory of a model's parts; "" for the kind that has no files
    title           what it is called after "its" or "an": "EAGLE-2 head"
    module          its ``FORMAT`` reads and runs it: see ``drafting.format``
    recognise       whether a config.json and the tensors beside it are of this kind; None: not by them
    formats         published formats that are read as this kind; those of block drafters are recognised by it
    files_of        the kind that its files are of, if its directory alone shows that it is another
    choice          place among the heads that draft unless another kind is named, the lowest first; None: it
                    drafts only if it or a strategy that needs it is named
    is_head         a small network on the target's states: its matrices are packed as lm_head is, and its
                    embeddings stay in their file
    is_block        drafts all depths of a tree in one pass
    in_target       of a layer of the target's own checkpoint, how the names of its tensors begin; "": it has
                    files of its own
    narrows         it can rank by a candidate head in the place of the target's lm_head (``drafting.candidates``)
    looks_up_target its embeddings are always the target's
    bound           one strategy alone uses it, and that strategy uses no other
    inner_states    needs states from within the target, which a pipeline's stages alone send
    shares_memory   its caches and recorded passes live in memory that is allocated at the start
    charged_as      the time of a profile's [draft] that a pass takes ``passes`` times: "pass_ms" or "lm_pass_ms",
                    or NAME_pass_ms, a time that this kind brings along; "": it takes none
    layers          of the target that a pass with a time of its own reads, beside lm_head: the time is estimated
                    from them where it is not measured
    launches        kernel launches of a pass: within the layers of a small model, and others
    graph_launches  all of them where passes are CUDA graphs; None: they are not recorded
    usual           the size that a plan assumes for one that is not on this machine
    made_by         the command that makes one for a model, if that takes no choice of a kind
    trainer         MODULE:NAME of what trains one for ``flowspec models train-head`` (``lab.training.heads``)
    measured_by     strategies whose requests measure a pass for a profile, in the time that ``charged_as`` names
    """

    name: str
    directory: str
    title: str
    module: str
    launches: tuple[int, int]
    recognise: Callable[[Mapping[str, Any], Shapes], bool] | None = None
    formats: tuple[str, ...] = ()
    files_of: str = ""
    choice: int | None = None
    is_head: bool = True
    is_block: bool = False
    in_target: str = ""
    narrows: bool = False
    looks_up_target: bool = False
    bound: bool = False
    inner_states: bool = False
    shares_memory: bool = True
    charged_as: str = "pass_ms"
    layers: int = 0
    passes: float = 1.0
    graph_launches: int | None = None
    usual: str = ""
    made_by: str = ""
    trainer: str = ""
    measured_by: tuple[str, ...] = ()

    @property
    def by_name_only(self) -> bool:
        """Whether a head of this kind drafts only if its name is given."""
        return self.is_head and self.choice is None
