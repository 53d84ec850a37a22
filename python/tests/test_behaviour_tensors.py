"""Dtypes, layouts, shared and odd parameters; buffers kept in step as DDP keeps them."""

from __future__ import annotations

import copy

import pytest
import torch
from checks import F, adam, assert_same, batch, compare, loss_of, mlp, names_of_checks, raises, run_checks, sgd
from torch import nn

pytestmark = pytest.mark.slow

STEPS = 4


def train(model, optimizer, rank, *shape, dtype=torch.float32, steps=STEPS) -> list:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step, *(shape or (6, 12))).to(dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_dtypes(rank: int) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
        for build in (sgd, adam) if dtype is not torch.float16 else (sgd,):

            def make(build=build, dtype=dtype):
                model = mlp().to(dtype)
                return model, build(model.parameters())

            compare(rank, make, lambda model, module, optimizer, dtype=dtype: train(model, optimizer, rank, dtype=dtype))


class Mixed(nn.Module):
    """Layers of three dtypes: three spaces."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 16)
        self.b = nn.Linear(16, 16).double()
        self.c = nn.Linear(16, 16).bfloat16()
        self.d = nn.Linear(16, 4)

    def forward(self, x):
        x = self.b(torch.tanh(self.a(x)).double())
        return self.d(self.c(x.bfloat16()).float())


def check_mixed_dtypes(rank: int) -> None:
    def make():
        model = Mixed()
        return model, adam(model.parameters())

    for options in ({}, {"partition": "1MiB", "fusion": "1MiB"}, {"partition": 64, "fusion": 0, "credit": 64}):
        compare(rank, make, lambda model, module, optimizer: train(model, optimizer, rank), **options)


def check_complex_parameters(rank: int) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, dtype=torch.complex64))
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=12))

    def make():
        model = Spectral()
        return model, adam(model.parameters())

    compare(rank, make, lambda model, module, optimizer: train(model, optimizer, rank))


def check_channels_last(rank: int) -> None:
    """Gradients have the parameter's strides, as the fused optimizers need."""
    for build in (adam, lambda p: torch.optim.AdamW(p, fused=True), sgd):

        def make(build=build):
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            model.to(memory_format=torch.channels_last)
            return model, build(model.parameters())

        def loop(model, module, optimizer):
            losses = train(model, optimizer, rank, 2, 3, 8, 8)
            assert module[2].weight.grad.stride() == module[2].weight.stride()
            return losses

        compare(rank, make, loop)


class Odd(nn.Module):
    """Scalars, empty tensors, one element, transposed storage, a shared weight, a parameter inside another's storage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.one = nn.Parameter(torch.ones(1))
        self.transposed = nn.Parameter(torch.randn(12, 16).t().mul(0.2))
        self.first, self.second = nn.Linear(16, 12), nn.Linear(16, 12)
        self.second.weight = self.first.weight
        self.alias = self.first

    def forward(self, x):
        h = F.linear(x, self.transposed) * self.scale + self.one
        out = self.first(torch.tanh(h)) + self.second(h) + self.alias(h)
        return out + self.empty.sum()


def check_odd_parameters(rank: int) -> None:
    for build in (adam, sgd):

        def make(build=build):
            model = Odd()
            return model, build(model.parameters())

        def loop(model, module, optimizer):
            losses = train(model, optimizer, rank)
            assert module.scale.grad.shape == () and module.empty.grad.shape == (0, 4)
            return losses, list(module.state_dict())

        for options in ({}, {"partition": "1MiB", "fusion": "1MiB"}, {"partition": 64, "fusion": 0}):
            compare(rank, make, loop, **options)


def check_only_an_empty_parameter_gets_a_gradient(rank: int) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0))
            self.other = nn.Linear(2, 2)

        def forward(self, x):
            return self.empty.sum() + x.sum() if x.dim() == 1 else self.other(x)

    import autobyte.torch as ab

    model = Empty()
    model, optimizer = ab.wrap(model, sgd(model.parameters()))
    for step in range(3):
        model(batch(rank, step, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(batch(rank, step, 3, 2)).sum().backward()
        optimizer.step()
    ab.synchronize(model)


def check_sparse_gradients_are_refused_by_name(rank: int) -> None:
    import autobyte.torch as ab

    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    model, optimizer = ab.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with raises(ab.AutoByteError, "0.weight", "sparse"):
        model(torch.tensor([1, 2])).sum().backward()


def check_a_model_that_changes_its_dtype(rank: int) -> None:
    import autobyte.torch as ab

    model = mlp()
    model, optimizer = ab.wrap(model, sgd(model.parameters()))
    train(model, optimizer, rank)
    model.double()
    with raises(ab.AutoByteError, "float64", "float32", "wrap()"):
        train(model, optimizer, rank, dtype=torch.float64)


class Counting(nn.Module):
    """Batch norm, and buffers of other kinds: integers, booleans, one outside state_dict, one that ranks change apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("largest", torch.zeros(12), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x):
        with torch.no_grad():
            self.calls += 1
            self.seen[self.calls % 3] = True
            self.largest.copy_(torch.maximum(self.largest, x.abs().amax(0)))
        return self.b(torch.relu(self.norm(self.a(x))))


def buffers(module) -> dict:
    return {name: value.clone() for name, value in module.named_buffers()}


def make_counting():
    model = Counting()
    model.calls.fill_(torch.randint(0, 100, ()))  # apart before wrapping
    return model, sgd(model.parameters())


def check_buffers(rank: int) -> None:
    """At every place of the loop, also after passes that don't train."""

    def loop(model, module, optimizer):
        seen = [buffers(module)]
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, batch(rank, step, 6, 12))
            seen.append(buffers(module))
            loss.backward()
            optimizer.step()
            seen.append(buffers(module))
            if step % 2:
                module.eval()
                with torch.no_grad():
                    seen.append(model(batch(rank, 70 + step, 6, 12)))
                seen.append(buffers(module))
                with torch.inference_mode():
                    model(batch(rank, 70 + step, 6, 12))
                model(batch(rank, 70 + step, 6, 12))
                module.train()
                seen.append(buffers(module))
        return seen

    compare(rank, make_counting, loop)


def check_buffers_in_no_sync(rank: int) -> None:
    def loop(model, module, optimizer):
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with model.no_sync():
                for part in range(2):
                    loss_of(model, batch(rank, 10 * step + part, 6, 12)).backward()
                    seen.append(buffers(module))
            loss_of(model, batch(rank, 10 * step + 5, 6, 12)).backward()
            seen.append(buffers(module))
            optimizer.step()
        return seen

    compare(rank, make_counting, loop)


def check_wrap_gives_rank_0s_parameters_and_buffers(rank: int) -> None:
    import autobyte.torch as ab

    torch.manual_seed(60 + rank)
    model, optimizer = make_counting()
    model.a.requires_grad_(False)
    torch.manual_seed(60)
    of_rank_0, _ = make_counting()
    ab.wrap(model, optimizer)
    assert_same(model.state_dict(), of_rank_0.state_dict())


def check_statistics_that_ranks_share(rank: int) -> None:
    """Frozen statistics, and affine-free norm."""

    def make():
        model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3))
        return model, adam(model.parameters())

    def loop(model, module, optimizer):
        losses = train(model, optimizer, rank)
        module[1].eval()
        losses += train(model, optimizer, rank)
        return losses, copy.deepcopy(buffers(module))

    compare(rank, make, loop)


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_tensors(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]
