"""Trains a small image classifier on scikit-learn's digits on every rank: what `autobyte demo` runs.

An ordinary data-parallel script: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from whoever starts it, so
torchrun does as well. `--mode ddp` trains with DistributedDataParallel, `--mode autobyte` with AutoByte, and
everything else is the same in both.

    torchrun --nproc-per-node 2 -m autobyte.demo --mode autobyte

It prints one JSON object a line. `--mode compare --out DIR` compares what two runs with `--out DIR` saved.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 1
# Steps that warm up caches, connections and DDP's buckets, and are not timed.
WARM_UP_STEPS = 5


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def make_model(channels: int = 128, blocks: int = 5) -> nn.Module:
    """A residual network of 1.5 million parameters for 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *(Residual(channels) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=297, stratify=labels, random_state=SEED)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    images, labels = data.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, test_data = load_data()
    sampler = DistributedSampler(train_data, seed=SEED)
    loader = DataLoader(train_data, batch_size=arguments.batch, sampler=sampler, drop_last=True)

    model = plain = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    if arguments.mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        import autobyte.torch as ab

        model, optimizer = ab.wrap(model, optimizer)

    steps = arguments.steps or arguments.epochs * len(loader)
    ends = []  # when each step ended, the first entry is the start of the first
    epoch = -1
    while len(ends) <= steps:
        epoch += 1
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in loader:
            if not ends:
                ends.append(time.monotonic())
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            ends.append(time.monotonic())
            if rank == 0:
                say(event="step", step=len(ends) - 1, steps=steps, loss=loss.item())
            if len(ends) > steps:
                break
    if arguments.mode == "autobyte":
        ab.synchronize(model)
    end = time.monotonic()  # nothing is left to communicate or to update

    last_epoch_loss = torch.stack(losses).mean() / world_size
    dist.all_reduce(last_epoch_loss)
    say(
        event="result",
        rank=rank,
        batch=arguments.batch,
        ends=ends,
        end=end,
        warm_up_steps=min(WARM_UP_STEPS, steps - 1),
        final_training_loss=last_epoch_loss.item(),
        test_accuracy=accuracy(plain, test_data),
        parameters=sum(p.numel() for p in plain.parameters()),
        torch=torch.__version__,
    )
    if arguments.out:
        state = {"parameters": dict(plain.named_parameters()), "buffers": dict(plain.named_buffers())}
        torch.save(state, arguments.out / f"{arguments.mode}.rank{rank}.pt")
    dist.barrier()
    if arguments.mode == "autobyte":
        ab.shutdown()
    dist.destroy_process_group()


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference between tensors of the same name; a NaN anywhere counts as infinite."""
    if a.keys() != b.keys():
        raise SystemExit(f"different tensors: {sorted(a.keys() ^ b.keys())}")
    largest = max((a[name].double() - b[name].double()).abs().max().item() for name in a)
    return largest if largest == largest else float("inf")


def compare(folder: Path) -> None:
    """Compares rank 0's parameters and buffers of both modes, and within a mode every rank's parameters.

    Ranks may differ in their buffers: each updates its own statistics after rank 0's were last handed out.
    """
    first, between_ranks = {}, {}
    for mode in ("ddp", "autobyte"):
        ranks = [torch.load(path) for path in sorted(folder.glob(f"{mode}.rank*.pt"))]
        first[mode] = {**ranks[0]["parameters"], **ranks[0]["buffers"]}
        between_ranks[mode] = max(difference(ranks[0]["parameters"], other["parameters"]) for other in ranks)
    say(event="compared", max_param_diff=difference(first["ddp"], first["autobyte"]), between_ranks=between_ranks)


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="autobyte.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", required=True, choices=["ddp", "autobyte", "compare"])
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead of epochs")
    parser.add_argument("--batch", type=int, default=128, help="samples a step on each rank")
    parser.add_argument("--out", type=Path, help="folder for the trained parameters, one file a rank")
    arguments = parser.parse_args()
    if arguments.mode == "compare":
        if arguments.out is None:
            parser.error("--mode compare needs --out")
        compare(arguments.out)
        return
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        sys.exit(f"{', '.join(missing)} not set: start this with torchrun or `autobyte demo`")
    train(arguments)


if __name__ == "__main__":
    main()
