"""What lies at a path: told from what is no model, and its configuration read.

For a folder nothing is ever fetched. For a name, the hub is asked once whether it answers; if it does not, what was
fetched before is used, and nobody waits for retries.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
from transformers.utils.hub import cached_file

from piecegraph.errors import ModelError

_HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")
"""What may be asked for on the hub: everything else can only be a folder."""

_PATIENCE_S = 5.0
"""How long the hub may take to say that it is there."""

_POINTER = b"version https://git-lfs"
"""How a file begins that stands for one that git has not fetched."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that was found, before any of its weights is read."""

    path: str
    config: Any
    is_local: bool
    """Whether everything is taken from this machine."""

    def file(self, name: str) -> Path | None:
        """One of its files, if there is such a one."""
        try:
            found = cached_file(self.path, name, local_files_only=self.is_local)
        except OSError:
            return None
        return Path(found) if found is not None else None

    def files(self, kind: str) -> list[Path]:
        """Its files of a kind (``"*.safetensors"``) that are on this machine."""
        config = self.file("config.json")
        return sorted(config.parent.glob(kind)) if config is not None else []


def find_checkpoint(path: str) -> Checkpoint:
    """Read the configuration of the model at a path.

    Raises:
        ModelError: PG661, there is none, or it cannot be used.
    """
    is_folder = os.path.exists(path)
    if is_folder:
        _check_files(Path(path))
    elif not _HUB_NAME.fullmatch(path):
        raise no_model(path, "there is no such folder", 'give a folder, or a name on the hub such as "org/model"')
    is_local = is_folder or not _hub_answers()
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=is_local)
    except Exception as error:  # values that a family cannot work with fail in its own code
        if is_local and not is_folder and isinstance(error, OSError):
            why = f"there is no such folder, and {huggingface_hub.constants.ENDPOINT} cannot be asked for it"
            raise no_model(path, why, "give the folder of a model, or connect to the network once") from error
        place = "its config.json cannot be used" if is_folder else "no such folder, and no name that transformers finds"
        raise no_model(path, f"{place}: {reason_of(error)}", "give the folder of a transformers model") from error
    _check_counts(path, config)
    return Checkpoint(path, config, is_local)


def no_model(path: str, why: str, hint: str) -> ModelError:
    """What to say of a path that cannot be loaded from."""
    return ModelError("PG661", f"{path} is no model", why=why, hint=hint)


def reason_of(error: Exception) -> str:
    """What transformers, or what it calls, says in many lines or in none."""
    if "trust_remote_code" in str(error):
        return "it needs code that comes with the model, and such code is not run"
    if isinstance(error, (pickle.UnpicklingError, EOFError)):
        return "a file of weights is no checkpoint of PyTorch"
    first, *others = str(error).strip().splitlines() or [""]
    told = f"{first} {others[0].strip()}" if first.endswith(":") and others else first
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


def _hub_answers() -> bool:
    """Transformers would ask for each file again and again, for minutes, where no network is."""
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception:  # noqa: BLE001 - of the HTTP library, which is another one from version to version
        return False
    return True


def _check_files(place: Path) -> None:
    """What transformers would trip over without saying where."""
    _check_kind(place)
    for file in sorted(place.iterdir()):
        if _is_pointer(file):
            why = f"its {file.name} is a pointer of git-lfs, not the file itself"
            raise no_model(str(place), why, "run `git lfs pull` in the folder")
    for name in ("config.json", "generation_config.json"):
        file = place / name
        try:
            is_fine = not file.is_file() or isinstance(json.loads(file.read_bytes()), dict)
            why = "it is no JSON object"
        except (OSError, ValueError, RecursionError) as error:
            is_fine, why = False, reason_of(error)
        if not is_fine:
            raise no_model(str(place), f"its {name} cannot be read: {why}", "check that the file is complete")


def _is_pointer(file: Path) -> bool:
    try:
        return file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(_POINTER)
    except OSError:
        return False  # told by what needs the file


def _check_kind(place: Path) -> None:
    """Raise if it is something else that people keep models in."""
    if quantised := _gguf_name(place):
        convert = f"AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file={quantised!r}).save_pretrained(...)"
        raise no_model(str(place), "it is in GGUF, which is not read", f"convert it by transformers: {convert}")
    if place.is_file():
        raise no_model(str(place), "it is a file", "give the folder that save_pretrained wrote")
    adapter = place / "adapter_config.json"
    if adapter.is_file():  # also beside a model: transformers would leave it out without peft
        why = "it holds an adapter (adapter_config.json), and adapters are not run"
        hint = "merge it into its model with peft: merge_and_unload(), then save_pretrained"
        raise no_model(str(place), why, hint)
    if not (place / "config.json").is_file():
        raise no_model(str(place), "it holds no config.json", "give the folder that save_pretrained wrote")


def _gguf_name(place: Path) -> str:
    """The GGUF file that is all there is of weights, or nothing."""
    if place.is_file():
        return place.name if place.suffix == ".gguf" else ""
    has_others = any(True for kind in ("*.safetensors", "*.bin") for _ in place.glob(kind))
    return "" if has_others else next((file.name for file in sorted(place.glob("*.gguf"))), "")


def _check_counts(path: str, config: Any) -> None:
    """Without layers or words there is nothing to run."""
    of_text = config.get_text_config()
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        count = getattr(of_text, name, None)
        if isinstance(count, int) and count < 1:
            raise no_model(path, f"its config.json says {name} is {count}", "check that the file is complete")
