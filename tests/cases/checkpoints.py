"""Tiny language models on disk, with a tokenizer that has one token for each printable character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import transformers

from tests.cases.llms import VOCABULARY, tiny_model

CHARACTERS = "".join(map(chr, range(32, 127)))
_FIRST = 4
"""Tokens 0 to 3 are special: padding, begin, end, unknown."""


def save_checkpoint(name: str, folder: Path, *, has_tokenizer: bool = True) -> Any:
    """Write a family's tiny model; returns transformers' own, to compare with."""
    model = tiny_model(name)
    model.save_pretrained(folder)
    if has_tokenizer:
        make_tokenizer().save_pretrained(folder)
    return model


def make_tokenizer() -> Any:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    vocabulary |= {character: _FIRST + i for i, character in enumerate(CHARACTERS)}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), VOCABULARY)}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    raw.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
