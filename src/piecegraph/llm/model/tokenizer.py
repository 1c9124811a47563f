"""The tokenizer of a model that was found."""

from __future__ import annotations

from typing import Any

from piecegraph.llm.model.checkpoint import reason_of


def read_tokenizer(path: str, *, is_local: bool) -> tuple[Any | None, str]:
    """The tokenizer at a path, or why there is none.

    Args:
        path: of a :class:`~piecegraph.llm.model.checkpoint.Checkpoint`.
        is_local: whether everything is taken from this machine.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=is_local)
        # transformers makes one up where there are no files for it; some of these have a piece besides the marks.
        is_empty = len(tokenizer) <= len(tokenizer.all_special_ids) + 1
    except Exception as error:  # noqa: BLE001 - tokenizers raise plain Exceptions, too; it is told when one is needed
        return None, reason_of(error)
    return (None, "its folder has no vocabulary") if is_empty else (tokenizer, "")
