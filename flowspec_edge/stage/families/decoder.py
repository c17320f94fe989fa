"""A family's decoder: embeddings, layers and a norm, as stages load and run them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowspec_edge.errors import UsageError
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.experts import Experts
from flowspec_edge.stage.families.delta_net import DeltaNet, Inputs
from flowspec_edge.stage.families.feed_forward import Mixture, Mlp, Routed, feed_forward
from flowspec_edge.stage.families.norm import Norm
from flowspec_edge.stage.families.rotary import Rotation
from flowspec_edge.stage.families.self_attention import Projected, SelfAttention
from flowspec_edge.util.linears import add_product

Begun = Projected | Inputs


class DecoderLayer(nn.Module):
    """One layer, dense or sparse, with attention or a recurrence; call :meth:`prepare` once it is loaded.

    A pass is ``before``, ``attend``, ``after`` and, with experts, ``mix``.  What depends on the text's length is in
    ``attend``, what depends on the rows' values in ``mix``: between them nothing changes from pass to pass but
    values, so that a GPU can repeat the launches (``stage.layer_graphs``).
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        family, width, eps = config.family, config.hidden_size, config.rms_norm_eps
        form, recurrent = family.form, config.layer_types[index] == "linear_attention"
        self._mixer = "linear_attn" if recurrent else "self_attn"
        self.add_module(self._mixer, (DeltaNet if recurrent else SelfAttention)(config, index))
        half = feed_forward(config, index)
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
        """The layer's experts; None if it is dense."""
        half = self.feed_forward
        return half.experts if isinstance(half, Mixture) else None

    def prepare(self) -> None:
        """Join matrices that multiply the same rows; the weights are loaded, where they will be used."""
        for module in self.children():
            cast(Any, module).prepare()

    def forward(self, rows: Tensor, rotation: Rotation, mask: Any, cache: Any, new: int) -> Tensor:
        """[N, H] to [N, H], which takes the memory of ``rows``.

        The first ``new`` rows enter the cache, the others are padding.

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
        half, projection, mixed = self.feed_forward, self.mixer.projection, self.mixer.finish(begun, attended)
        if self._norms_of_outputs:
            rows += self.post_attention_layernorm(projection(mixed))
            rows += self.post_feedforward_layernorm(half(self.pre_feedforward_layernorm(rows)))
            return None
        add_product(rows, projection, mixed)
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

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        rows = torch.empty(config.vocab_size, config.hidden_size)  # given: to draw them would import torch._dynamo
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=rows)
        self.layers = nn.ModuleList(layers_on_meta(config, 0, config.num_hidden_layers))
        self.norm = norm_on_meta(config)


def skeleton(config: DecoderConfig) -> Decoder:
    """Make a decoder on the meta device.  UsageError for values that do not fit together."""
    with _on_meta(config):
        return Decoder(config)


def layers_on_meta(config: DecoderConfig, first: int, stop: int) -> list[DecoderLayer]:
    """Make layers [first, stop) on the meta device; errors as for :func:`skeleton`."""
    with _on_meta(config):
        return [DecoderLayer(config, i) for i in range(first, stop)]


def norm_on_meta(config: DecoderConfig) -> Norm:
    """Make the norm behind the last layer on the meta device."""
    with torch.device("meta"):
        return Norm(config.hidden_size, config.rms_norm_eps, config.family.form.centred_norms)


@contextmanager
def _on_meta(config: DecoderConfig) -> Iterator[None]:
    try:
        with torch.device("meta"):
            yield
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # of PyTorch, about shapes
        reason = shorten(str(error), 200, placeholder=" …")
        raise UsageError(f"{config.origin} describes no model: {reason}") from error


def embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    """Return by what the rows of the embeddings are multiplied, rounded to ``dtype``."""
    if not config.family.form.scaled_embeddings:
        return 1.0
    return float(torch.tensor(float(config.hidden_size) ** 0.5, device="cpu").to(dtype))
