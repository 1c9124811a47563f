"""The weights of a checkpoint, accounted for: what its files hold, and what of it the model was given.

What transformers tells about names comes in, and what the files say of themselves; an error comes out, unless every
weight of the model came from the files and every weight in the files has a place in the model. Weights without a place
are let pass only if their name says that they take no part in an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.llm.model.checkpoint import Checkpoint
from piecegraph.llm.model.quantisation import refused_quantisation

_HARMLESS = re.compile(
    r"(^|\.)(original_)?inv_freq$"  # of rotations, computed from the configuration
    r"|(^|\.)position_ids$"  # 0, 1, 2, ...
    r"|\.(attn|attention)\.(masked_)?bias$"  # causal masks, which older families kept
    r"|\.[qkv]_scale$"  # of a quantised cache; ours is not
    r"|(^|\.)mtp(_layers?)?\."  # heads that guess tokens ahead
    r"|(^|\.)(vision_tower|vision_model|visual|vqmodel|audio_tower|multi_modal_projector)\."  # not for text
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

_OF_QUANTISATION = re.compile(
    r"[._:]((weight|input|output|activation)_scale(_inv|_2)?|scales|weight_(packed|shape|zero_point|format)"
    r"|qweight|qzeros|g_idx|SCB|(nested_)?absmax|(nested_)?quant_(map|state.*)|W_q|zero_point|_weight_qdata|_data)$"
)
"""How the parts of a packed weight are called, by all who pack them."""

_PART = re.compile(r"[._]?(weight|blocks|(weight_)?q?scales?(_inv|_weight)?)$")
"""What the names of a packed weight and of its scales differ in."""

_PACKED_TYPES = re.compile(r"[IU](8|16|32)|F[468](_.*)?")
"""Types of safetensors that hold a quantised weight, or a part of one. Tables of 64-bit integers and masks do not."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file says of one of its tensors."""

    dtype: str
    """As safetensors writes it: ``BF16``."""
    shape: tuple[int, ...]


def read_stored(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The names, types and shapes that the files of a checkpoint name; nothing for files of pickle, which name none."""
    whole = checkpoint.file(SAFE_WEIGHTS_NAME)
    index = checkpoint.file(SAFE_WEIGHTS_INDEX_NAME) if whole is None else None
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values())) if index is not None else []
    files = [whole] if whole is not None else [checkpoint.file(name) for name in names]
    stored: dict[str, StoredTensor] = {}
    for file in files:
        assert file is not None, "it was loaded from"
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        stored |= {name: StoredTensor(told["dtype"], tuple(told["shape"])) for name, told in header.items()}
    return stored


def check_weights(
    checkpoint: Checkpoint, model: Any, told: Mapping[str, Collection[Any]], *, is_quantised: bool
) -> tuple[Decision, ...]:
    """Compare what was loaded with the files that it was loaded from.

    Args:
        checkpoint: where it was loaded from.
        model: what was loaded.
        told: what transformers says of names: ``missing_keys``, ``unexpected_keys`` and ``mismatched_keys``.
        is_quantised: whether weights were unpacked, so that they are no longer of the types and sizes in the files.

    Raises:
        ModelError: PG661, the files and the model do not fit; PG669, the files are of an unnamed quantisation.
    """
    stored = read_stored(checkpoint)
    if is_quantised:
        _check_scales(checkpoint, stored)
    left_out = sorted(name for name in told["unexpected_keys"] if _is_harmless(name, model.config))
    unused = sorted(set(told["unexpected_keys"]) - set(left_out))
    _check_types(checkpoint, model, {} if is_quantised else stored, unused)
    _check_names(checkpoint, model, told, unused)
    num_stored = sum(prod(tensor.shape) for tensor in stored.values())
    num_loaded = sum(weight.numel() for weight in model.parameters())  # a shared one counts once
    if stored and not is_quantised and num_loaded > num_stored:
        why = f"its files hold {num_stored:,} numbers, and {type(model).__name__} needs {num_loaded:,}"
        raise _do_not_fit(checkpoint.path, why)
    return (Decision("unused weights", _some(left_out), "no part of an answer"),) if left_out else ()


def _check_types(
    checkpoint: Checkpoint, model: Any, stored: Mapping[str, StoredTensor], unused: Collection[str]
) -> None:
    """Raise if the files are quantised without saying so: transformers takes packed numbers for weights."""
    kept = model.state_dict()
    packed = [
        f"{name} ({tensor.dtype})"
        for name, tensor in stored.items()
        if _PACKED_TYPES.fullmatch(tensor.dtype)
        and not _is_harmless(name, model.config)
        and (name not in kept or kept[name].is_floating_point())
    ]
    parts = [name for name in unused if _OF_QUANTISATION.search(name)] or packed
    if parts:
        told = f"quantised in a way that its config.json does not tell: it holds {_some(parts)}"
        raise refused_quantisation(checkpoint.path, told)


def _check_scales(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor]) -> None:
    """Raise if a packed weight has no scale: it would be unpacked as if it needed none."""
    scaled = {_PART.sub("", name) for name in stored if "scale" in name}
    packed = {name for name, tensor in stored.items() if "scale" not in name and _PACKED_TYPES.fullmatch(tensor.dtype)}
    bare = [name for name in packed if _PART.sub("", name) not in scaled]
    if bare:
        raise _do_not_fit(checkpoint.path, f"its files lack the scales of {_some(bare)}")


def _check_names(
    checkpoint: Checkpoint, model: Any, told: Mapping[str, Collection[Any]], unused: Collection[str]
) -> None:
    """Transformers would fill what is missing, or of another shape, with random numbers, and leave out what is more."""
    if told["mismatched_keys"]:
        name, found, expected = min(told["mismatched_keys"])
        others = len(told["mismatched_keys"]) - 1
        many = f" ({others} more like it)" if others else ""
        why = f"{name} is of shape {tuple(found)} in its files, and of {tuple(expected)} by its config.json{many}"
        raise _do_not_fit(checkpoint.path, why)
    parts = [f"lack {_some(told['missing_keys'])}"] if told["missing_keys"] else []
    parts += [f"hold {_some(unused)}, which {type(model).__name__} has no place for"] if unused else []
    if parts:
        raise _do_not_fit(checkpoint.path, f"its files {' and '.join(parts)}")


def _is_harmless(name: str, config: Any) -> bool:
    """Whether a weight without a place takes no part in an answer."""
    if _HARMLESS.search(name):
        return True
    of_text = config.get_text_config()
    first, layer = getattr(of_text, "num_hidden_layers", 0), _LAYER.search(name)
    num_ahead = getattr(of_text, "num_nextn_predict_layers", None) or 0  # layers that guess tokens ahead
    return layer is not None and first <= int(layer[1]) < first + num_ahead


def _do_not_fit(path: str, why: str) -> ModelError:
    hint = "check that the files are complete and of this kind of model"
    return ModelError("PG661", f"the model at {path} cannot be loaded", why=why, hint=hint)


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
