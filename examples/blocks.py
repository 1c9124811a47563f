"""A few small layers, as something to trace.

piecegraph trace examples/blocks.py --limit 6
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, TOKENS = 512, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        hidden = nn.functional.gelu(hidden)
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.cumsum(-1)


def run() -> None:
    """Ten calls."""
    model = Model().to(DEVICE).eval()
    x = torch.ones(TOKENS, WIDTH, device=DEVICE)
    with torch.inference_mode():
        for _ in range(10):
            model(x)


if __name__ == "__main__":
    run()
