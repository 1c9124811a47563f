"""A tiny language model whose tokens are bytes, so that it can say anything, and a character has several tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def byte_tokenizer(chat_template: str | None = None) -> Any:
    tokens = SPECIAL + sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: number for number, token in enumerate(tokens)}, [], unk_token="<unk>")
    )
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    found = hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if chat_template is not None:
        found.chat_template = chat_template
    return found


def write_byte_llm(folder: Path, *, chat_template: str | None = None, length: int = 512) -> str:
    """Write it as transformers would; returns the path."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=length,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.5,
    )
    hf.LlamaForCausalLM(config).eval().save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return str(folder)
