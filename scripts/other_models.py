"""Models of timm and of transformers with random weights, and inputs for them. Nothing here knows piecegraph.

A model is named ``timm/<name>`` or ``transformers/<family>``. Of a family of transformers, one class is taken: the
first of :data:`KINDS` that it has.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tiny_config import CORRECTIONS, SIZES, VOCABULARY
from transformers.models.auto import modeling_auto

Inputs = dict[str, torch.Tensor]

KINDS = {
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "detection": ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "KEYPOINT_DETECTION"),
    "segmentation": ("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "SEMANTIC_SEGMENTATION"),
    "vision": ("IMAGE_CLASSIFICATION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", "IMAGE_TO_IMAGE", "IMAGE"),
    "audio": ("CTC", "AUDIO_CLASSIFICATION", "TEXT_TO_WAVEFORM", "AUDIO_XVECTOR"),
    "causal LM": ("CAUSAL_LM",),
    "encoder": ("MASKED_LM", "SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING", "TEXT_ENCODING"),
    "image and text": ("ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    "other": ("",),
}
"""The tasks of each kind, as transformers' mappings are called."""

MAX_PARAMETERS = 400_000_000
_SMALL_NAMES = (
    "test_", "atto", "femto", "pico", "xxtiny", "xtiny", "nano", "tiny", "micro", "mini", "xxs", "xs", "small",
    "_s", "18", "b0", "t0", "_t", "26", "34", "50",
)  # fmt: skip


@dataclass(frozen=True)
class OtherModel:
    """A model that runs, and what to call it with."""

    module: torch.nn.Module
    inputs: Callable[[int, torch.Generator], Inputs]
    """Takes the batch size; made on the CPU."""


@functools.cache
def all_models() -> dict[str, str]:
    """The name of every model, with its kind."""
    return {**_timm_names(), **{f"transformers/{name}": kind for name, (kind, _) in _families().items()}}


def build(name: str) -> OtherModel:
    """A model by its name."""
    library, _, rest = name.partition("/")
    torch.manual_seed(0)
    return _build_timm(rest) if library == "timm" else _build_transformers(rest)


# --- timm


class _NotInstalled(type):
    """Stands for whatever a package that is not there would have."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NotInstalled(name, (), {})


class _EmptyPackage(types.ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NotInstalled(name, (), {"__module__": self.__name__})


class _EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """timm imports torchvision and PIL for its data pipelines, which its models do without."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_unused = name.partition(".")[0] in ("torchvision", "PIL")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_unused else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _EmptyPackage(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@functools.cache
def _timm() -> Any:
    finder = _EmptyPackages()
    sys.meta_path.append(finder)
    try:
        return importlib.import_module("timm")
    finally:  # transformers looks for them, too, and must not find these
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _EmptyPackage)]:
            del sys.modules[name]


def _timm_names() -> dict[str, str]:
    """Two small models of every family of timm, if it is installed."""
    if importlib.util.find_spec("timm") is None:
        return {}
    timm = _timm()
    names: dict[str, str] = {}
    for family in timm.list_modules():
        found = sorted(timm.list_models(module=family), key=lambda name: (_smallness(name), len(name), name))
        names |= {f"timm/{name}": "timm" for name in found[:2]}
    return names


def _smallness(name: str) -> int:
    return next((i for i, part in enumerate(_SMALL_NAMES) if part in name), len(_SMALL_NAMES))


def _build_timm(name: str) -> OtherModel:
    module = _timm().create_model(name, pretrained=False).eval()
    channels, height, width = module.default_cfg.get("test_input_size") or module.default_cfg["input_size"]
    if not module.default_cfg.get("fixed_input_size") and min(height, width) > 128:
        height = width = 128 if _takes(module, channels, 128) else height
    return OtherModel(module, lambda batch, generator: {"x": _normal((batch, channels, height, width), generator)})


def _takes(module: torch.nn.Module, channels: int, size: int) -> bool:
    try:
        with torch.no_grad():
            module(torch.zeros(1, channels, size, size))
    except Exception:  # noqa: BLE001 - whatever it says, it does not take it
        return False
    return True


# --- transformers


@functools.cache
def _families() -> dict[str, tuple[str, str]]:
    """The kind and the class of every family."""
    found: dict[str, tuple[str, str]] = {}
    for kind, tasks in KINDS.items():
        for task in tasks:
            name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
            for family, classes in getattr(modeling_auto, name).items():
                found.setdefault(family, (kind, classes if isinstance(classes, str) else classes[0]))
    return found


def _build_transformers(family: str) -> OtherModel:
    kind, class_name = _families()[family]
    reasons: list[str] = []
    for config in _configs(family, kind):
        try:
            module = _module(class_name, config)
            for inputs in _ways_to_call(module):
                _require_run(module, inputs)
                return OtherModel(module, inputs)
        except Exception as error:  # noqa: BLE001 - the next configuration may do
            reasons.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")
    raise ValueError("; ".join(dict.fromkeys(reasons)))


def _module(class_name: str, config: Any) -> torch.nn.Module:
    cls = getattr(transformers, class_name)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in cls(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters are too many")
    module: torch.nn.Module = cls(config).eval()
    return module


def _configs(family: str, kind: str) -> Iterator[Any]:
    """Configurations from tiny to as it comes; not every family can be built of every one."""
    cls = transformers.CONFIG_MAPPING[family]
    images = {"image_size": 64, "patch_size": 8} if kind != "causal LM" else {}
    for sizes in ({**SIZES, **images}, {**SIZES, "image_size": 64}, {}):
        try:
            config = _shrunk(cls, sizes, CORRECTIONS.get(family, {}) if sizes else {})
        except Exception:  # noqa: BLE001 - a family that checks its sizes: the next may do
            continue
        yield config
    yield cls()


def _shrunk(cls: type, sizes: Mapping[str, int], corrections: Mapping[str, Any]) -> Any:
    small: dict[str, Any] = {}
    for name, value in vars(cls()).items():
        if name in corrections and not isinstance(corrections[name], dict):
            small[name] = corrections[name]
        elif isinstance(value, transformers.PreTrainedConfig):
            nested = corrections.get(name)
            small[name] = _shrunk(type(value), sizes, nested if isinstance(nested, dict) else {})
        elif isinstance(value, int) and not isinstance(value, bool):
            if name in sizes:
                small[name] = sizes[name]
            elif name.endswith("_layers") or name in ("n_layer", "num_blocks", "depth"):
                small[name] = min(value, 2)
    return cls(**small)


def _require_run(module: torch.nn.Module, inputs: Callable[[int, torch.Generator], Inputs]) -> None:
    with torch.no_grad():
        for batch in (2, 3):
            module(**inputs(batch, torch.Generator().manual_seed(0)))


def _ways_to_call(module: Any) -> Iterator[Callable[[int, torch.Generator], Inputs]]:
    """The first with which the model runs: its main input, with a mask, or all that is known of its arguments."""
    known = _known_inputs(module)
    taken = [name for name in inspect.signature(module.forward).parameters if name in known]
    main = [name for name in (module.main_input_name,) if name in known]
    decoder = [name for name in ("decoder_input_ids",) if name in taken and module.config.is_encoder_decoder]
    masks = [name for name in taken if name == "attention_mask" and main == ["input_ids"]]
    last: Exception | None = None
    for names in dict.fromkeys(map(tuple, ([*main, *masks, *decoder], [*main, *decoder], main, taken))):

        def inputs(batch: int, generator: torch.Generator, names: tuple[str, ...] = names) -> Inputs:
            return {name: known[name](batch, generator) for name in names}

        try:
            if names:
                _require_run(module, inputs)
                yield inputs
                return
        except Exception as error:  # noqa: BLE001 - the next way may do
            last = last or error
    raise last or ValueError(f"no inputs are known for {module.main_input_name}")


def _known_inputs(module: Any) -> dict[str, Callable[[int, torch.Generator], torch.Tensor]]:
    config = module.config
    vision = getattr(config, "vision_config", None) or config
    size = _first_number(getattr(vision, "image_size", None) or 64)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    frames = getattr(vision, "num_frames", None)
    image = (frames, channels, size, size) if frames else (channels, size, size)
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80
    positions = getattr(config, "max_source_positions", None) or 16
    features = (bins, 2 * positions) if "whisper" in type(module).__name__.lower() else (32, bins)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY
    longest = min(vocabulary, VOCABULARY)

    def tokens(batch: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(6, max(longest, 7), (batch, 12), generator=generator)

    return {
        "input_ids": tokens,
        "decoder_input_ids": tokens,
        "attention_mask": lambda batch, generator: torch.ones(batch, 12, dtype=torch.long),
        "pixel_values": lambda batch, generator: _normal((batch, *image), generator),
        "pixel_values_videos": lambda batch, generator: _normal((batch, *image), generator),
        "input_values": lambda batch, generator: _normal((batch, 4000), generator),
        "input_features": lambda batch, generator: _normal((batch, *features), generator),
        "inputs_embeds": lambda batch, generator: _normal((batch, 12, config.hidden_size), generator),
        "past_values": lambda batch, generator: _normal((batch, 64, 1), generator),
    }


def _first_number(value: Any) -> int:
    if isinstance(value, dict):
        return int(next(iter(value.values())))
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)
