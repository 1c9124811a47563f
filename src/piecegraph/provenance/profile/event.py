"""Events of a Chrome trace, with the few fields that are used: decoded by msgspec where it is installed.

Both decoders give objects with the same attributes. msgspec never builds what is not asked for, so it is several times
faster; what it refuses (a number written as text, ``NaN``) is left to the standard library, which takes more.
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


@dataclass(slots=True)
class Arguments:
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
class Event:
    """One event; times in microseconds."""

    ph: str
    cat: str
    name: str
    ts: float
    dur: float
    pid: int | str
    tid: int | str
    args: Arguments


Decode = Callable[[str], Sequence[Event]]
"""Takes a JSON list of events. Raises ``ValueError`` if the text is none."""


def decode_with_json(text: str) -> Sequence[Event]:
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


def event_of(fields: dict[str, Any]) -> Event:
    """An event from parsed JSON; whatever is missing or odd gets a value that stands for nothing."""
    args = fields.get("args")
    return Event(
        ph=str(fields.get("ph", "")),
        cat=str(fields.get("cat", "")),
        name=str(fields.get("name", "")),
        ts=_number(fields.get("ts")),
        dur=_number(fields.get("dur")),
        pid=_identity(fields.get("pid", 0)),
        tid=_identity(fields.get("tid", 0)),
        args=_arguments_of(args) if isinstance(args, dict) and args else _NO_ARGUMENTS,
    )


def _arguments_of(fields: dict[str, Any]) -> Arguments:
    dims, types = fields.get("Input Dims"), fields.get("Input type")
    return Arguments(
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


_NO_ARGUMENTS = Arguments()


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
        "Arguments",
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
        "Event",
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

    def decode(text: str) -> Sequence[Event]:
        try:
            return fast(text)
        except ValidationError:
            return decode_with_json(text)

    return decode
