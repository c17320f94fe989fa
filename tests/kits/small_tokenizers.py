"""Small tokenizers of the kinds that models come with, built by hand."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

_PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyzAEINRSTUVY[]/.,:?<>!", "é", "中", "文", "\n"]
_MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("中", "文"), ("▁", "▁"), ("i", "n")]


def sentencepiece_style() -> PreTrainedTokenizerFast:
    """As Llama-2's tokenizer.json: "▁" for spaces, one put before the text, bytes for what is unknown.

    0 <unk>, 1 <s>, 2 </s>, 3 to 258 bytes, then pieces; <s> is put before every text.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *_PIECES,
              *(a + b for a, b in _MERGES)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=_MERGES,
                                   unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>",
                                   eos_token="</s>", clean_up_tokenization_spaces=False)


def unigram_style() -> PreTrainedTokenizerFast:
    """As those of Gemma and T5: every piece has a score, and bytes are for what is unknown; ids as above."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"he lo\":{}", "▁", "a", "n",
              "t", "i", "▁in", "▁the", "hello"]
    backend = Tokenizer(models.Unigram([(token, -float(i)) for i, token in enumerate(tokens)], 0, True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                         decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>",
                                   eos_token="</s>", clean_up_tokenization_spaces=False)


def save(tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    """Put it in place of a model's own."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (target / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(target)
