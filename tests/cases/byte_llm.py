"""A tiny language model whose tokens are bytes, so that it can say anything, and a character has several tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def byte_tokenizer(chat_template: str | None = None, *, falls_back: bool = False) -> Any:
    """Of the kind of GPT 2, or, if it falls back to bytes, of Llama 2."""
    if falls_back:
        raw = _raw([f"<0x{byte:02X}>" for byte in range(256)], byte_fallback=True)
        steps = tokenizers.decoders
        raw.decoder = steps.Sequence([steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    else:
        raw = _raw(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = tokenizers.decoders.ByteLevel()
    found = hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if chat_template is not None:
        found.chat_template = chat_template
    return found


def _raw(tokens: list[str], **options: Any) -> Any:
    vocabulary = {token: number for number, token in enumerate(SPECIAL + tokens)}
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", **options))


def write_byte_llm(
    folder: Path, *, chat_template: str | None = None, length: int = 512, falls_back: bool = False
) -> str:
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
    byte_tokenizer(chat_template, falls_back=falls_back).save_pretrained(folder)
    return str(folder)
