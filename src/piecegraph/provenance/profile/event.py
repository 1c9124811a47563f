"""Events of a Chrome trace, with the few fields that are used: decoded by msgspec where it is installed.

Both decoders give objects with the same attributes. msgspec never builds what is not asked for, so it is several times
faster; what it refuses (a number written as text, ``NaN``) is left to the standard library, which takes more. The
shapes of an op's arguments stay JSON until they are asked for: most events share theirs with many others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, SupportsInt

NO_JSON = b""
"""What stands for a field that is not there, where a field is kept as JSON."""

_LARGEST = 2**63 - 1
_LENIENT = json.JSONDecoder(strict=False)  # older profilers left control characters in names


_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "long int": "int64", "long": "int64", "long long": "int64", "int": "int32", "short int": "int16", "short": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "TensorList": "tensor", "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
_NO_TENSOR = frozenset({"", "Scalar", "ScalarList", "GenericList"})


@dataclass(slots=True)
class EventArguments:
    """What a profiler adds to an event."""

    correlation: int = -1
    external_id: int = 0
    graph_id: int = 0
    node_id: int = 0
    device: int = 0
    stream: int | str = ""
    grid: Sequence[SupportsInt] = ()
    block: Sequence[SupportsInt] = ()
    dims: Any = NO_JSON
    """JSON as bytes, or something that ``bytes()`` takes. Equal text is equal, so it need not be parsed every time."""
    types: Any = NO_JSON


@dataclass(slots=True)
class ProfileEvent:
    """One event; times in microseconds."""

    ph: str
    cat: str
    name: str
    ts: float
    dur: float
    pid: int | str
    tid: int | str
    args: EventArguments


Decode = Callable[[str], Sequence[ProfileEvent]]
"""Takes a JSON list of events. Raises ``ValueError`` if the text is none."""


def decode_with_json(text: str) -> Sequence[ProfileEvent]:
    """A list of events, by the standard library."""
    values = _LENIENT.decode(text)
    if not all(isinstance(value, dict) for value in values):
        raise ValueError("an event was expected")
    return [event_of(value) for value in values]


def decode_whole(text: str) -> Sequence[Any]:
    """A list of events with all that is in them."""
    values: list[Any] = _LENIENT.decode(text)
    return values


def decode_one(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at ``start``, and where it ends. Raises ``JSONDecodeError``."""
    return _LENIENT.raw_decode(text, start)


def event_of(fields: dict[str, Any]) -> ProfileEvent:
    """An event from parsed JSON; whatever is missing or odd gets a value that stands for nothing."""
    args = fields.get("args")
    return ProfileEvent(
        ph=str(fields.get("ph", "")),
        cat=str(fields.get("cat", "")),
        name=str(fields.get("name", "")),
        ts=_number(fields.get("ts")),
        dur=_number(fields.get("dur")),
        pid=_identity(fields.get("pid", 0)),
        tid=_identity(fields.get("tid", 0)),
        args=_arguments_of(args) if isinstance(args, dict) and args else _NO_ARGUMENTS,
    )


def _arguments_of(fields: dict[str, Any]) -> EventArguments:
    dims, types = fields.get("Input Dims"), fields.get("Input type")
    return EventArguments(
        correlation=_integer(fields.get("correlation"), -1),
        external_id=_integer(fields.get("External id"), 0),
        graph_id=_integer(fields.get("graph id"), 0, largest=_LARGEST >> 32),
        node_id=_integer(fields.get("graph node id"), 0),
        device=_integer(fields.get("device"), 0),
        stream=fields.get("stream", ""),
        grid=_list(fields.get("grid")),
        block=_list(fields.get("block")),
        dims=NO_JSON if dims is None else json.dumps(dims).encode(),
        types=NO_JSON if types is None else json.dumps(types).encode(),
    )


_NO_ARGUMENTS = EventArguments()


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return 0.0
    return number if math.isfinite(number) else 0.0


def _integer(value: Any, otherwise: int, largest: int = _LARGEST) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return number if abs(number) <= largest else otherwise


def _identity(value: Any) -> int | str:
    return value if isinstance(value, int) else str(value)


def _list(value: Any) -> Sequence[SupportsInt]:
    return value if isinstance(value, list) else ()


def _msgspec_decoder() -> Decode:
    from msgspec import Meta, Raw, convert, defstruct, field
    from msgspec.json import Decoder

    number = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
    small = Annotated[int, Meta(ge=0, le=_LARGEST >> 32)]

    def json_field(name: str) -> Any:
        return field(name=name, default=Raw(NO_JSON))

    arguments = defstruct(
        "EventArguments",
        [
            ("correlation", number, -1),
            ("external_id", number, field(name="External id", default=0)),
            ("graph_id", small, field(name="graph id", default=0)),
            ("node_id", number, field(name="graph node id", default=0)),
            ("device", int, 0),
            ("stream", int | str, ""),
            ("grid", tuple[int, ...], ()),
            ("block", tuple[int, ...], ()),
            ("dims", Raw, json_field("Input Dims")),
            ("types", Raw, json_field("Input type")),
        ],
        gc=False,
    )
    nothing = convert({}, arguments)
    event = defstruct(
        "ProfileEvent",
        [
            ("ph", str, ""),
            ("cat", str, ""),
            ("name", str, ""),
            ("ts", float, 0.0),
            ("dur", float, 0.0),
            ("pid", int | str, 0),
            ("tid", int | str, 0),
            ("args", arguments, field(default_factory=lambda: nothing)),
        ],
        gc=False,
    )
    decode: Decode = Decoder(list[event]).decode  # type: ignore[valid-type]
    return decode


def fastest_decoder() -> Decode:
    """msgspec's where it is installed, else the standard library's."""
    try:
        fast = _msgspec_decoder()
    except ImportError:
        return decode_with_json
    from msgspec import ValidationError

    def decode(text: str) -> Sequence[ProfileEvent]:
        try:
            return fast(text)
        except ValidationError:
            return decode_with_json(text)

    return decode


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
