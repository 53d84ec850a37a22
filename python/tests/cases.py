"""Training cases: models, optimizers and plans, trained with DDP or with AutoByte."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
BATCH = 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(BATCH, 12, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


class CNN(nn.Module):
    """Convolutions with batch norm, weights in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(48, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(BATCH, 3, 8, 8, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


class Transformer(nn.Module):
    """Tied embedding and output weights, and nn.MultiheadAttention, which reads out_proj past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.attention = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.feed = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(2))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for attention, norm, feed in zip(self.attention, self.norms, self.feed, strict=True):
            n = norm(h)
            h = h + attention(n, n, n, need_weights=False)[0]
            h = h + feed(h)
        return self.head(h).flatten(0, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randint(0, 20, (BATCH, 6), generator=generator),
            torch.randint(0, 20, (BATCH * 6,), generator=generator),
        )


MODELS = {"mlp": MLP, "cnn-bn": CNN, "transformer-tied": Transformer}

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum-wd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
}



def _has_fused_on_cpu() -> bool:
    """PyTorch has fused optimizers for the CPU from 2.4 on."""
    try:
        OPTIMIZERS["adamw-fused"]([nn.Parameter(torch.zeros(1))])
    except RuntimeError:
        return False
    return True


if not _has_fused_on_cpu():
    del OPTIMIZERS["adamw-fused"]

PLANS: dict[str, dict] = {
    "tiny": {"partition": 512, "fusion": 0, "credit": 2048},
    "one": {"partition": "1GiB", "fusion": "1GiB", "credit": "1GiB"},
    "fused": {"partition": 1024, "fusion": 4096, "credit": 8192},
    "credit-small": {"partition": 4096, "fusion": 512, "credit": 256},
    "fifo": {"partition": 2048, "fusion": 1024, "credit": 4096, "policy": "fifo"},
    "retuned": {"partition": 4096, "fusion": 1024, "credit": 8192},
}
RETUNES = {6: {"partition": 512, "fusion": 0}, 12: {"partition": "1MiB", "fusion": "1MiB", "credit": "1MiB"}}


@dataclass
class Trained:
    """What a training run leaves: tensors by name."""

    losses: list[float] = field(default_factory=list)
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)


def make(model: str, optimizer: str, rank: int, grid: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A fresh model and optimizer; the ranks start apart, since wrapping must bring them together."""
    torch.manual_seed(1000 + rank)
    module = MODELS[model]()
    if grid:
        for p in module.parameters():
            p.register_hook(lambda g: torch.round(g * 1024) / 1024)
    return module, OPTIMIZERS[optimizer](module.parameters())


def train(model, module, optimizer, rank: int, clip: bool, before_step=None) -> Trained:
    """The loop of a script that knows nothing of AutoByte. model is module, or module in DDP."""
    out = Trained()
    generator = torch.Generator().manual_seed(7 + rank)
    for step in range(STEPS):
        if before_step is not None:
            before_step(step)
        inputs, targets = module.batch(generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        out.losses.append(loss.item())
    out.model = {name: value.detach().clone() for name, value in module.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                out.optimizer[f"{index}.{name}"] = value.detach().clone()
    return out


def train_with_ddp(model: str, optimizer: str, rank: int, clip: bool, grid: bool = False) -> Trained:
    module, opt = make(model, optimizer, rank, grid)
    return train(DistributedDataParallel(module), module, opt, rank, clip)


def train_with_autobyte(model: str, optimizer: str, plan: str, rank: int, clip: bool, grid: bool = False) -> Trained:
    import autobyte.torch as ab

    module, opt = make(model, optimizer, rank, grid)
    wrapped, opt = ab.wrap(module, opt, **PLANS[plan])
    assert wrapped is module

    def retune(step: int) -> None:
        if plan == "retuned" and step in RETUNES:
            ab.configure(module, **RETUNES[step])

    out = train(module, module, opt, rank, clip, retune)
    ab.shutdown()
    return out


def largest_difference(one: Trained, other: Trained) -> float:
    """Over losses, parameters, buffers and optimizer state; infinite where something is missing."""
    if one.model.keys() != other.model.keys() or one.optimizer.keys() != other.optimizer.keys():
        return float("inf")
    worst = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    for ours, theirs in ((one.model, other.model), (one.optimizer, other.optimizer)):
        for name, value in ours.items():
            if value.numel():
                worst = max(worst, (value.double() - theirs[name].double()).abs().max().item())
    return worst if worst == worst else float("inf")
