"""torch.compile, and processes that are forked from one that trains."""

from __future__ import annotations

import os
import sys
import traceback

import pytest
import torch
from checks import adam, assert_same, batch, compare, loss_of, mlp, names_of_checks, run_checks, sgd, state_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.slow

STEPS = 4


class Blocks(nn.Module):
    """Two blocks to compile, with attention that reads weights past their module, between eager layers; and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.embed = nn.Linear(12, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(self.norm(x.flatten(0, 1)).view_as(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model, module, optimizer, rank) -> tuple:
    losses, evaluated = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step, 3, 5, 12))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 2:
            with torch.no_grad():
                evaluated.append(model(batch(0, 50 + step, 3, 5, 12)))
    return losses, evaluated, state_of(module, optimizer)


def breaks_while(run) -> tuple[object, int]:
    """What run returns, and the graph breaks that torch.compile counted in it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    result = run()
    return result, sum(counters["graph_break"].values())


def compile_and_train(rank: int, how: str, backend: str, ours: bool) -> tuple:
    import autobyte.torch as ab

    torch.manual_seed(11)
    module = Blocks()
    optimizer = sgd(module.parameters())
    model = module

    def wrap(model) -> nn.Module:
        return ab.wrap(model, optimizer, partition=512, fusion=256)[0] if ours else DistributedDataParallel(model)

    if how == "whole, before wrap":
        model = wrap(torch.compile(module, backend=backend))
    elif how == "whole, after wrap":
        model = torch.compile(wrap(module), backend=backend)
    elif how == "in place":
        module.compile(backend=backend)
        model = wrap(module)
    elif how == "blocks":
        for block in module.blocks:
            block.compile(backend=backend)
        model = wrap(module)
    elif how == "blocks as modules":
        for i in range(2):
            module.blocks[i] = torch.compile(module.blocks[i], backend=backend)
        model = wrap(module)
    result = train(model, module, optimizer, rank)
    ab.shutdown()
    return result


WAYS = ("whole, before wrap", "whole, after wrap", "in place", "blocks", "blocks as modules")


def check_compiled_models_equal_ddp(rank: int) -> None:
    for backend in ("eager", "aot_eager"):
        for how in WAYS:
            try:
                ours, breaks = breaks_while(lambda how=how, backend=backend: compile_and_train(rank, how, backend, True))
                theirs, _ = breaks_while(lambda how=how, backend=backend: compile_and_train(rank, how, backend, False))
                assert_same(ours, theirs)
                if how in ("whole, before wrap", "blocks", "blocks as modules"):
                    assert breaks == 0, f"{breaks} graph breaks"
            except AssertionError as error:
                raise AssertionError(f"{how}, {backend}: {error}") from error


def check_inductor(rank: int) -> None:
    """Compiled code may round differently, so this is a comparison to a tolerance."""
    outcomes = []
    for ours in (True, False):
        torch._dynamo.reset()
        outcomes.append(compile_and_train(rank, "blocks", "inductor", ours))
    assert max(abs(a - b) for a, b in zip(outcomes[0][0], outcomes[1][0])) < 1e-4
    for name, value in outcomes[1][2]["model"].items():
        assert torch.allclose(outcomes[0][2]["model"][name], value, atol=1e-4), name


def check_blocks_are_gated_one_by_one(rank: int) -> None:
    """The first compiled block runs while later updates are still pending."""
    import autobyte.torch as ab

    module = Blocks()
    for block in module.blocks:
        block.compile(backend="eager")
    model, optimizer = ab.wrap(module, adam(module.parameters()))
    train(model, module, optimizer, rank)
    optimizer.zero_grad()
    loss_of(model, batch(rank, 0, 3, 5, 12)).backward()
    optimizer.step()
    pending = []
    module.embed.register_forward_hook(lambda *_: pending.append(ab.stats(model)["pending_updates"]))
    module.blocks[0].register_forward_hook(lambda *_: pending.append(ab.stats(model)["pending_updates"]))
    model(batch(rank, 1, 3, 5, 12))
    assert 0 <= pending[1] < pending[0], pending
    assert ab.stats(model)["pending_updates"] == 0
    ab.shutdown(model)
    assert "CompiledCall" not in type(module.blocks[0]._compiled_call_impl).__name__


class Numbers(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(12, generator=torch.Generator().manual_seed(index))


def check_data_loaders_that_fork(rank: int) -> None:
    """Workers are forked in mid-training, while gradients are in flight."""

    def make():
        model = mlp()
        return model, adam(model.parameters())

    def loop(model, module, optimizer):
        losses = []
        for _ in range(2):
            loader = DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork")
            for inputs in loader:
                optimizer.zero_grad()
                loss = loss_of(model, inputs + rank)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    compare(rank, make, loop)


def check_a_forked_child_is_told(rank: int) -> None:
    """A child that trains the model gets a clear error, can read weights, and exits; the parent goes on."""
    import autobyte.torch as ab

    model = mlp()
    model, optimizer = ab.wrap(model, adam(model.parameters()))

    def step(number):
        optimizer.zero_grad()
        loss_of(model, batch(rank, number, 6, 12)).backward()
        optimizer.step()

    step(0)
    ab.synchronize(model)
    for pending in (False, True):
        if pending:
            step(1)
        for action in ("forward", "stats"):
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    model[0].weight.sum() if not pending else None
                    model(batch(rank, 0, 6, 12)) if action == "forward" else ab.stats(model)
                    text = "no error"
                except BaseException:  # noqa: BLE001 - it is told to the parent
                    text = traceback.format_exc()
                os.write(writing, text.encode()[-3000:])
                os._exit(7)
            os.close(writing)
            with os.fdopen(reading, "rb") as pipe:
                text = pipe.read().decode()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, text
            assert "AutoByteError" in text and "fork" in text, text
    step(2)
    ab.synchronize(model)
    sys.stdout.flush()


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_compile(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]
