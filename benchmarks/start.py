"""Starts of language models in new processes: cold, warm, and with weights that a disk has to be asked for.

Each process loads a model, answers a request of one token, and tells the seconds of each stage. The first finds an
empty cache; those behind it find what it kept. With ``--weights`` a checkpoint of random numbers is written first, and
the last start finds none of it in memory: what the disk takes is told beside what it takes to read the file alone.

python benchmarks/start.py                                # built-in shapes, no files
python benchmarks/start.py --weights /data/checkpoints    # written there once, 1.2 and 16 GB
python benchmarks/start.py --models tiny --weights /tmp/checkpoints
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starts import STARTED_BY, Start, run_start, show, start_twice, tell_start

_BLOCK = 64 * 2**20


def start(folder: str, arguments: dict[str, Any]) -> Start:
    """In a new process: load, answer, tell."""
    begin = time.perf_counter()
    import piecegraph

    llm = piecegraph.LLM(folder, **arguments)
    ready = time.perf_counter()
    llm.generate([list(range(1, 17))], max_new_tokens=1, ignore_eos=True)
    token = time.perf_counter() - ready
    stats = llm.stats()
    cache = next((str(decision) for decision in llm.started.decisions if decision.subject == "cache"), "")
    return Start(ready - begin, stats["stages"], cache, stats["weights"], token)


def write_checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint of a built-in shape with random weights, unless it is there already."""
    import torch
    import transformers

    from piecegraph.bench.shapes import shape_config

    place = folder / name
    if not (place / "config.json").exists():
        config = shape_config(name)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
        unfinished = folder / f".{name}"
        model.save_pretrained(unfinished, max_shard_size="5GB")
        unfinished.rename(place)
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the processes that start need it
    return place


def drop_from_memory(files: list[Path]) -> None:
    """Have the kernel forget what it has read of files."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)  # what is not written yet cannot be forgotten
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def disk_rate(files: list[Path]) -> float:
    """GB/s of reading files from the disk, block by block, by one reader that does nothing else."""
    drop_from_memory(files)
    buffer, num_bytes, begin = bytearray(_BLOCK), 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return num_bytes / 1e9 / (time.perf_counter() - begin)


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All starts of a model."""
    print(f"\n{name}", flush=True)
    arguments: dict[str, Any] = {"max_batch_tokens": options.max_batch_tokens} if options.max_batch_tokens else {}
    with tempfile.TemporaryDirectory() as scratch:
        if options.weights is None:
            from piecegraph.bench.shapes import shape_folder

            arguments["load_format"] = "dummy"
            words = [__file__, "--folder", shape_folder(name), "--arguments", json.dumps(arguments)]
            return {each: asdict(found) for each, found in start_twice(words).items()}
        folder = write_checkpoint(name, options.weights)
        words = [__file__, "--folder", str(folder), "--arguments", json.dumps(arguments)]
        files = sorted(folder.glob("*.safetensors"))
        starts = {each: run_start(words, f"{scratch}/cache") for each in ("cold", "warm")}
        rate = disk_rate(files)
        drop_from_memory(files)
        starts["warm, files on the disk"] = run_start(words, f"{scratch}/cache")
        show(starts)
        print(f"  the disk alone: {rate:.2f} GB/s", flush=True)
        return {"disk_gb_per_second": rate, **{each: asdict(found) for each, found in starts.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-0.6b,llama-8b", help="comma list of built-in shapes")
    parser.add_argument("--weights", type=Path, help="a folder to write checkpoints to, and to start from")
    parser.add_argument("--max-batch-tokens", type=int, default=0, help="of a step; 0 for the default")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--arguments", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="write JSON")
    options = parser.parse_args()
    if STARTED_BY in os.environ:
        tell_start(start(options.folder, json.loads(options.arguments)))
        return
    if options.weights is not None:
        options.weights.mkdir(parents=True, exist_ok=True)
    found = {name: run(name, options) for name in options.models.split(",")}
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
