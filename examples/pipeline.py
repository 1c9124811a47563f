"""Two stages of a model in two processes, each compiled, with an object of tensors between them.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed, nn

import piecegraph

WIDTH, NUM_LAYERS = 64, 4
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


class IntermediateTensors:
    """What one stage hands to the next. Nothing is registered: an object that holds tensors is taken apart."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class Stage(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, given: IntermediateTensors) -> IntermediateTensors:
        hidden, residual = given["hidden"], given["residual"]
        for layer in self.layers:
            residual = residual + hidden
            hidden = torch.relu(layer(residual))
        return IntermediateTensors({"hidden": hidden, "residual": residual})


def send(tensors: IntermediateTensors, to: int) -> None:
    layouts = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.tensors.items()]
    distributed.send_object_list([layouts], to, device=DEVICE)
    for tensor in tensors.tensors.values():
        distributed.send(tensor.contiguous(), to)


def receive(source: int) -> IntermediateTensors:
    box: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    distributed.recv_object_list(box, source, device=DEVICE)
    tensors = {name: torch.empty(shape, dtype=dtype, device=DEVICE) for name, shape, dtype in box[0]}
    for tensor in tensors.values():
        distributed.recv(tensor, source)
    return IntermediateTensors(tensors)


@torch.no_grad()
def main() -> None:
    distributed.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    rank, num_stages = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)).to(DEVICE)
    mine = layers[rank * NUM_LAYERS // num_stages : (rank + 1) * NUM_LAYERS // num_stages]
    sizes = {"given.tensors.hidden": {0: "tokens"}, "given.tensors.residual": {0: "tokens"}}
    stage = piecegraph.compile(Stage(mine), dynamic_dims=sizes, backend="eager")
    for num_tokens in (5, 8, 3):
        inputs = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(num_tokens)).to(DEVICE)
        first = IntermediateTensors({"hidden": inputs, "residual": torch.zeros_like(inputs)})
        found = stage(first if rank == 0 else receive(rank - 1))
        if rank + 1 < num_stages:
            send(found, rank + 1)
        else:
            difference = (found["hidden"] - Stage(layers)(first)["hidden"]).abs().max().item()
            print(f"{num_tokens} tokens through {num_stages} stages: differs by {difference:.0e}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
