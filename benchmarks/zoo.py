"""Models beyond LLMs, in a size for benchmarks and a tiny one for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, ViTConfig, ViTModel


class ConvNet(nn.Module):
    """Convolutions with batch norm, as image classifiers have them."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.blocks = nn.ModuleList([self._block(width) for _ in range(num_blocks)])
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _block(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class UNetBlock(nn.Module):
    """One level of a diffusion U-Net: residual convolutions with a time embedding, attention over pixels, down and up
    again.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, width) for _ in range(5)])
        self.convs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)])
        self.time, self.qkv, self.out = (
            nn.Linear(width, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )
        self.down, self.merge = nn.Conv2d(width, width, 3, stride=2, padding=1), nn.Conv2d(2 * width, width, 1)

    def _residual(self, x: Tensor, time: Tensor, first: int) -> Tensor:
        y = self.convs[first](F.silu(self.norms[first](x))) + self.time(F.silu(time))[:, :, None, None]
        return x + self.convs[first + 1](F.silu(self.norms[first + 1](y)))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[4](x)).flatten(2).transpose(1, 2).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.out(attended.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        kept = self._residual(x, time, 0)
        low = self._attend(self._residual(self.down(kept), time, 2))
        return self.merge(torch.cat([F.interpolate(low, scale_factor=2.0), kept], 1))


@dataclass(frozen=True)
class ZooModel:
    """A model with the inputs and arguments to compile it with."""

    name: str
    make: Callable[[bool], nn.Module]
    """Takes whether it is to be tiny."""
    inputs: Callable[[int, bool], dict[str, Tensor]]
    """Takes the batch size and whether the model is tiny; made on the CPU."""
    arguments: dict[str, Any]


def _bert(tiny: bool) -> nn.Module:
    size = (
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 100,
        }
        if tiny
        else {}
    )
    return BertModel(BertConfig(**size), add_pooling_layer=False)


def _vit(tiny: bool) -> nn.Module:
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    }
    return ViTModel(ViTConfig(**(small if tiny else {})), add_pooling_layer=False)


def _image(batch: int, size: int, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size)


ZOO = [
    ZooModel(
        "BERT",
        _bert,
        lambda batch, tiny: {"input_ids": torch.randint(0, 100, (batch, 12 if tiny else 128))},
        {"dynamic_dims": {"input_ids": {0: "batch", 1: "length"}}},
    ),
    ZooModel(
        "ViT",
        _vit,
        lambda batch, tiny: {"pixel_values": _image(batch, 32 if tiny else 224)},
        {"dynamic_dims": {"pixel_values": 0}},
    ),
    ZooModel(
        "conv net",
        lambda tiny: ConvNet(8, 3) if tiny else ConvNet(64, 6),
        lambda batch, tiny: {"image": _image(batch, 16 if tiny else 64)},
        {},
    ),
    ZooModel(
        "U-Net block",
        lambda tiny: UNetBlock(8 if tiny else 128),
        lambda batch, tiny: {
            "x": _image(batch, 8 if tiny else 32, 8 if tiny else 128),
            "time": torch.randn(batch, 8 if tiny else 128),
        },
        {},
    ),
]
