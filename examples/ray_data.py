"""Answers to a folder of prompts, by Ray Data: each replica holds a model, and what is answered is not asked again.

    python examples/ray_data.py MODEL prompts/ answers/ --replicas 4

A prompt is a file, NAME.txt; its answer is NAME.json in the other folder, which appears whole or not at all. So a run
that was stopped, or lost a machine, goes on where it was when the same command is run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import ray
import ray.data

import piecegraph


class Answer:
    """One replica: a model, and batches of prompts."""

    def __init__(self, model: str, folder: str, max_new_tokens: int, device: str) -> None:
        backend = "eager" if device == "cpu" else "inductor"
        self._llm = piecegraph.LLM(model, device=device, backend=backend, options={"progress": False})
        self._folder, self._max_new_tokens = Path(folder), max_new_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = [Path(path).read_text("utf-8") for path in batch["path"]]
        answers = self._llm.generate(prompts, max_new_tokens=self._max_new_tokens, on_error="return")
        for path, answer in zip(batch["path"], answers, strict=True):
            told = {"text": answer.text, "finish_reason": answer.finish_reason}
            if answer.error is not None:
                told["error"] = str(answer.error)
            unfinished = self._folder / f".{Path(path).stem}.unfinished"
            unfinished.write_text(json.dumps(told), "utf-8")
            unfinished.replace(self._folder / f"{Path(path).stem}.json")
        return {"path": batch["path"]}


@click.command()
@click.argument("model")
@click.argument("prompts", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("answers", type=click.Path(file_okay=False, path_type=Path))
@click.option("--replicas", default=1, show_default=True)
@click.option("--batch-size", default=256, show_default=True, help="Prompts that a replica is given at once.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--device", default="cuda", show_default=True, help="cuda or cpu.")
def main(
    model: str, prompts: Path, answers: Path, replicas: int, batch_size: int, max_new_tokens: int, device: str
) -> None:
    answers.mkdir(parents=True, exist_ok=True)
    left = [path for path in sorted(prompts.glob("*.txt")) if not (answers / f"{path.stem}.json").exists()]
    if left:
        rows = ray.data.from_items([{"path": str(path.absolute())} for path in left])
        done = rows.map_batches(
            Answer,
            fn_constructor_args=(model, str(answers.absolute()), max_new_tokens, device),
            batch_size=batch_size,
            compute=ray.data.ActorPoolStrategy(size=replicas),
            num_gpus=0 if device == "cpu" else 1,
        )
        done.materialize()
    click.echo(f"answered {len(left)} prompts")


if __name__ == "__main__":
    main()
