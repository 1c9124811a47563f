"""The shapes of an op's arguments, from what a profiler writes down of them."""

from __future__ import annotations

import json
from typing import Any

_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "long int": "int64", "long": "int64", "long long": "int64", "int": "int32", "short int": "int16", "short": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "TensorList": "tensor", "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
_NO_TENSOR = frozenset({"", "Scalar", "ScalarList", "GenericList"})


def shape_texts(dims: Any, types: Any) -> tuple[str, ...]:
    """One text for each tensor; numbers and other arguments are left out.

    >>> shape_texts([[16, 4096], [], [[2], [3]]], ["c10::BFloat16", "Scalar", "TensorList"])
    ('bfloat16[16, 4096]', 'tensor[2]', 'tensor[3]')
    """
    if not isinstance(dims, list):
        return ()
    # Without types a tensor without dimensions looks like a number; numbers are more common.
    names = types if isinstance(types, list) and len(types) == len(dims) else ["tensor" if one else "" for one in dims]
    texts: list[str] = []
    for shape, name in zip(dims, names, strict=True):
        if not isinstance(shape, list) or name in _NO_TENSOR:
            continue
        is_list = bool(shape) and all(isinstance(one, list) for one in shape)
        texts += [f"{_dtype(name)}{list(one)}" for one in (shape if is_list else [shape])]
    return tuple(texts)


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name.removeprefix("c10::").lower())


class ShapeTexts:
    """Numbers for lists of shapes; each distinct list is parsed once. Number 0 is that of no shapes."""

    def __init__(self) -> None:
        self.values: list[tuple[str, ...]] = [()]
        self._numbers: dict[tuple[bytes, bytes], int] = {(b"", b""): 0}

    def number(self, dims: Any, types: Any) -> int:
        """Of shapes as JSON: ``b'[[2, 8], []]'`` and ``b'["float", "Scalar"]'``."""
        key = (bytes(dims), bytes(types))
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self.values)
            self.values.append(shape_texts(*(json.loads(text) if text else None for text in key)))
        return known
