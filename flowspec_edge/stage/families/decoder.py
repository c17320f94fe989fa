"""A family's decoder: embeddings, layers and a norm, as stages load and run them."""

from __future__ import annotations

from textwrap import shorten
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowspec_edge.errors import UsageError
from flowspec_edge.model.config import types_of_layers
from flowspec_edge.model.experts import Experts
from flowspec_edge.model.families import Family, family_of
from flowspec_edge.stage.families.delta_net import DeltaNet, Inputs
from flowspec_edge.stage.families.feed_forward import Mixture, Mlp, Routed, feed_forward
from flowspec_edge.stage.families.norm import Norm
from flowspec_edge.stage.families.rotary import Rotation
from flowspec_edge.stage.families.self_attention import Projected, SelfAttention

Begun = Projected | Inputs


class DecoderLayer(nn.Module):
    """One layer, dense or sparse, with attention or a recurrence; call :meth:`prepare` once it is loaded.

    A pass is ``before``, ``attend``, ``after`` and, with experts, ``mix``.  What depends on the text's length is in
    ``attend``, what depends on the rows' values in ``mix``: between them nothing changes from pass to pass but
    values, so that a GPU can repeat the launches (``layers.graphs``).
    """

    def __init__(self, config: Any, family: Family, index: int) -> None:
        super().__init__()
        form, width, eps = family.form, int(config.hidden_size), config.rms_norm_eps
        self._mixer = "linear_attn" if types_of_layers(config)[index] == "linear_attention" else "self_attn"
        self.add_module(self._mixer, DeltaNet(config, index, form.delta_by_key_head)
                        if self._mixer == "linear_attn" else SelfAttention(config, form, index))
        half = feed_forward(config, form, family.experts, index)
        self._half = family.experts.block if family.experts and isinstance(half, Mixture) else "mlp"
        self.add_module(self._half, half)
        self._norms_of_outputs = form.norms_of_outputs
        self.input_layernorm = Norm(width, eps, form.centred_norms)
        self.post_attention_layernorm = Norm(width, eps, form.centred_norms)
        if form.norms_of_outputs:
            self.pre_feedforward_layernorm = Norm(width, eps, form.centred_norms)
            self.post_feedforward_layernorm = Norm(width, eps, form.centred_norms)

    @property
    def mixer(self) -> Any:
        """A :class:`SelfAttention` or a :class:`DeltaNet`."""
        return self._modules[self._mixer]

    @property
    def feed_forward(self) -> Mlp | Mixture:
        return cast("Mlp | Mixture", self._modules[self._half])

    @property
    def experts(self) -> Experts | None:
        """None: the layer is dense."""
        half = self.feed_forward
        return half.experts if isinstance(half, Mixture) else None

    def prepare(self) -> None:
        """Join matrices that multiply the same rows; the weights are loaded, where they will be used."""
        for module in self.children():
            cast(Any, module).prepare()

    def forward(self, rows: Tensor, rotation: Rotation, mask: Any, cache: Any, new: int) -> Tensor:
        """[N, H] to [N, H], which takes the memory of ``rows``; the first ``new`` rows enter the cache, the others are
        padding.

        mask, cache  of ``CacheKind.inputs``
        """
        begun = self.before(rows, rotation)
        routed = self.after(rows, begun, self.attend(begun, mask, cache, new))
        if routed is not None:
            self.mix(rows, routed, new)
        return rows

    def before(self, rows: Tensor, rotation: Rotation) -> Begun:
        """Norm and project rows [N, H]."""
        begun: Begun = self.mixer.before(self.input_layernorm(rows), rotation)
        return begun

    def attend(self, begun: Begun, mask: Any, cache: Any, new: int) -> Tensor:
        """Add the rows to the cache, and read it; :meth:`room` has the shape."""
        attended: Tensor = self.mixer.attend(begun, mask, cache, new)
        return attended

    def room(self, rows: int, like: Tensor) -> Tensor:
        """Memory for what ``attend`` returns; ``like``: a tensor of the layers' dtype and device."""
        room: Tensor = self.mixer.room(rows, like)
        return room

    def after(self, rows: Tensor, begun: Begun, attended: Tensor) -> Routed | None:
        """Replace ``rows`` with the layer's output; with experts, with what ``mix`` completes."""
        half = self.feed_forward
        if self._norms_of_outputs:
            rows += self.post_attention_layernorm(self.mixer.out(begun, attended))
            rows += self.post_feedforward_layernorm(half(self.pre_feedforward_layernorm(rows)))
            return None
        self.mixer.add_to(rows, begun, attended)
        normed = self.post_attention_layernorm(rows)
        if isinstance(half, Mixture):
            return half.route(rows, normed)
        half.add_to(rows, normed)
        return None

    def mix(self, rows: Tensor, routed: Routed, new: int) -> None:
        """Add what the experts make of the first ``new`` rows: padding touches none."""
        half = self.feed_forward
        assert isinstance(half, Mixture)
        rows[:new] += half.experts(*(part[:new] for part in routed))


class Decoder(nn.Module):
    """The whole decoder of a model; its state has the names of a checkpoint's tensors behind ``model.``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        family, width = family_of(config), int(config.hidden_size)
        self.embed_tokens = nn.Embedding(int(config.vocab_size), width)
        self.layers = nn.ModuleList(DecoderLayer(config, family, i) for i in range(int(config.num_hidden_layers)))
        self.norm = Norm(width, config.rms_norm_eps, family.form.centred_norms)


def skeleton(config: Any) -> Decoder:
    """Make a decoder on the meta device, with all layers.  UsageError for values that do not fit together."""
    try:
        with torch.device("meta"):
            return Decoder(config)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # of PyTorch, about shapes
        reason = shorten(str(error), 200, placeholder=" …")
        raise UsageError(f"{config.name_or_path}/config.json describes no model: {reason}") from error


def embedding_scale(config: Any, dtype: torch.dtype) -> float:
    """Return by what the rows of the embeddings are multiplied, rounded to ``dtype``."""
    if not family_of(config).form.scaled_embeddings:
        return 1.0
    return float(torch.tensor(float(config.hidden_size) ** 0.5, device="cpu").to(dtype))
