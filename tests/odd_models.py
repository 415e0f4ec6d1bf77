"""Models as users bring them: frozen parameters, unused ones, a layer in two places, a buffer that evaluation changes.

`model.target=odd_models:frozen`, and so on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scaling.workload import Tensors, Workload

WIDTH = 6


class Layer(nn.Module):
    """84 parameters, and as many as its spare has."""

    def __init__(self, spare: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.spare = spare

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return hidden


class Odd(nn.Module):
    """24 parameters before its layers and 7 behind them; `seen` is added to what goes in."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 1)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen += x.mean(0)
        hidden = self.before(x + self.seen)
        for layer in self.layers:
            hidden = layer(hidden)
        found: Tensor = self.head(hidden)
        return found


def plain() -> Workload:
    """Two layers, of which nothing is odd but the buffer."""
    return _of(Odd(Layer(), Layer()))


def frozen() -> Workload:
    """What lies before the layers is frozen, all of the first layer, and half of the second: 49 of 199 train."""
    module = Odd(Layer(), Layer())
    for part in (module.before, module.layers[0], module.get_submodule("layers.1.inner")):
        part.requires_grad_(False)
    return _of(module)


def unused() -> Workload:
    """The second layer has 42 parameters that no forward uses."""
    return _of(Odd(Layer(), Layer(spare=nn.Linear(WIDTH, WIDTH))))


def shared() -> Workload:
    """One layer in two places."""
    layer = Layer()
    return _of(Odd(layer, layer))


class Scaled(Odd):
    """With a parameter of no dimensions."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def scalar() -> Workload:
    return _of(Scaled(Layer()))


def _of(module: nn.Module) -> Workload:
    return Workload(module, _loss, lambda n, generator: {"x": torch.rand(n, 3, generator=generator)}, (Layer,))


def _loss(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int]:
    x = tensors["x"]
    return (module(x)[:, 0] - x.sum(1)).pow(2).sum(), len(x)


MODELS: dict[str, Callable[[], Workload]] = {each.__name__: each for each in (plain, frozen, unused, shared)}
