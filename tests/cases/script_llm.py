"""A language model that says its vocabulary word by word: what follows a word is the next one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf

WIDTH = 64


def write_script_llm(folder: Path, words: Sequence[str], *, chat_template: str, response_template: Any) -> str:
    """Write it as transformers would; returns the path. The first word is for unknown ones, the last ends a text."""
    config = hf.LlamaConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=len(words) - 1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(words), WIDTH))
        model.lm_head.weight.copy_(torch.eye(len(words), WIDTH).roll(1, 0))
    model.save_pretrained(folder)
    known = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0])
    )
    known.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=known, unk_token=words[0], eos_token=words[-1])
    tokenizer.chat_template, tokenizer.response_template = chat_template, response_template
    tokenizer.save_pretrained(folder)
    return str(folder)
