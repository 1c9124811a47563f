"""Models beyond LLMs at batch 1: eager, torch.compile and piecegraph. Outputs are compared before anything is timed.

python benchmarks/models.py
python benchmarks/models.py --tiny --models BERT
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import piecegraph
from piecegraph.base.compare import relative_error
from piecegraph.base.structure import flatten
from piecegraph.bench.machine import hardware
from piecegraph.bench.timing import QUICK, Effort, measure
from results import Contender, table

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.zoo import ZOO, ZooModel

MAX_ERROR = 5e-3  # float32 with TF32 convolutions, against eager


def run(model: ZooModel, device: torch.device, effort: Effort, *, tiny: bool) -> list[Contender]:
    torch.manual_seed(0)
    module = model.make(tiny).eval().requires_grad_(False).to(device)
    inputs = {name: tensor.to(device) for name, tensor in model.inputs(1, tiny).items()}
    expected = flatten(module(**inputs))[0][0]
    fast = piecegraph.compile(module, **model.arguments)
    contenders = []
    for name, way in (("eager", module), ("torch.compile", torch.compile(module)), ("piecegraph", fast)):
        error = relative_error(flatten(way(**inputs))[0][0], expected)
        if not error <= MAX_ERROR:
            raise SystemExit(f"{model.name}, {name}: outputs differ from eager by {error:.3g}")
        contenders.append(Contender(name, {model.name: measure(lambda way=way: way(**inputs), effort)}))
    stats = fast.stats()
    contenders[-1].notes.update({"coverage": f"{stats['coverage']:.0%}", "losses": sum(stats["events"].values())})
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    names = [model.name for model in ZOO]
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    effort = QUICK if options.tiny else Effort()
    merged: dict[str, Contender] = {}
    with torch.inference_mode():
        for model in ZOO:
            if model.name not in options.models:
                continue
            for contender in run(model, device, effort, tiny=options.tiny):
                into = merged.setdefault(contender.name, Contender(contender.name, {}))
                into.timings.update(contender.timings)
                for note, value in contender.notes.items():
                    into.notes[note] = f"{into.notes[note]}, {value}" if note in into.notes else str(value)
    print(f"batch 1, {hardware()}; {effort}\n{table(list(merged.values()))}")


if __name__ == "__main__":
    main()
