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


def save_checkpoint(
    name: str, folder: Path, *, has_tokenizer: bool = True, num_layers: int | None = None, asks_all: bool = False
) -> Any:
    """Write a family's tiny model; returns transformers' own, to compare with."""
    model = tiny_model(name, num_layers=num_layers, asks_all=asks_all)
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


def make_byte_tokenizer() -> Any:
    """As most models have one: of bytes, with tokens of several characters that may be written in other ways, too."""
    letters = {character: "Ġ" if character == " " else character for character in CHARACTERS}
    pieces = ['":', '",', '{"', '"}', 'Ġ"', "tr", "ue", "true", "fa", "ls", "fals", "false", "12", "ab", "na", "me"]
    merges = [('"', ":"), ('"', ","), ("{", '"'), ('"', "}"), ("Ġ", '"'), ("t", "r"), ("u", "e"), ("tr", "ue")]
    merges += [("f", "a"), ("l", "s"), ("fa", "ls"), ("fals", "e"), ("1", "2"), ("a", "b"), ("n", "a"), ("m", "e")]
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *letters.values(), *pieces]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
