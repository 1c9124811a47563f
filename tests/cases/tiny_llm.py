"""A tiny language model with words for tokens: small enough to be loaded in every test that needs a command's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf

WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    "<user>",
    "<assistant>",
    *(f"{first}{second}" for first in "abcdefg" for second in "xyz"),
]
CHAT = "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}<assistant>"


def tiny_model(seed: int = 0, length: int = 64) -> Any:
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        max_position_embeddings=length,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    return hf.LlamaForCausalLM(config).eval()


def tiny_tokenizer(*, chat: bool) -> Any:
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = CHAT
    return tokenizer


def write_tiny_llm(folder: Path, *, chat: bool = True, seed: int = 0, length: int = 64) -> str:
    """Write both as transformers would; returns the path."""
    tiny_model(seed, length).save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)
    return str(folder)
