"""A tokenizer for a model of random weights: as many tokens as it has, each of which is a text."""

from __future__ import annotations

import random
from typing import Any

import tokenizers
import transformers

_LETTERS = "eeeeeeeeeeeetttttttttaaaaaaaaooooooooiiiiiiinnnnnnnsssssshhhhhhrrrrrrddddlllluuucccmmmwwffggyyppbbvk"
_MARKS = ['":', '",', '{"', '"}', '":Ġ"', '",Ġ"', 'Ġ"', "},", "],", "Ġ[", '["', '"]', "00", "10", "20", "12"]


def make_tokenizer(vocab_size: int) -> Any:
    """Bytes, marks of JSON, and random words that begin with a space or not, with all their beginnings."""
    tokens = {byte: number for number, byte in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    chance = random.Random(0)

    def add(word: str) -> None:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens[word[:end]] = len(tokens)
                merges.append((word[: end - 1], word[end - 1]))

    for mark in _MARKS:
        add(mark)
    while len(tokens) < vocab_size:
        add(chance.choice(["", "Ġ", "Ġ"]) + "".join(chance.choices(_LETTERS, k=chance.randint(2, 9))))
    kept = {token: number for token, number in tokens.items() if number < vocab_size}
    merges = [(first, second) for first, second in merges if {first, second, first + second} <= kept.keys()]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(kept, merges))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
