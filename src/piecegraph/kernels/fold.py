"""Module paths without the numbers of layers."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def fold_numbers(path: str) -> str:
    """Equal for the same part of every layer.

    >>> fold_numbers("model.layers.3.mlp.experts.12"), fold_numbers("0.weight2")
    ('model.layers.*.mlp.experts.*', '*.weight2')
    """
    return _NUMBER.sub("*", path)
