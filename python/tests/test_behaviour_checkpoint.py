"""Checkpoints move between plain PyTorch and AutoByte both ways, and can be loaded in mid-run."""

from __future__ import annotations

import copy
import io
from collections import defaultdict

import pytest
import torch
from checks import SMALL, adam, assert_same, batch, compare, loss_of, names_of_checks, run_checks, sgd, state_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.slow


def build(optimizer=adam):
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 5))
    return model, optimizer(model.parameters())


def train(model, optimizer, rank, steps) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step, 6, 12))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(model, optimizer) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return buffer.getvalue()


def load(model, optimizer, checkpoint: bytes) -> None:
    state = torch.load(io.BytesIO(checkpoint), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def check_there_and_back(rank: int) -> None:
    """Plain, AutoByte, plain: every stretch goes on exactly where the last one ended, as if DDP had run it all."""
    import autobyte.torch as ab

    for optimizer_kind in (sgd, adam, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)):
        torch.manual_seed(7)
        start = build(optimizer_kind)
        checkpoint = saved(*start)
        outcomes = []
        for ours in (False, True):
            losses, state = [], checkpoint
            for stretch, steps in enumerate((range(3), range(3, 6), range(6, 9))):
                torch.manual_seed(50 + rank)
                module, optimizer = build(optimizer_kind)
                if stretch != 1 or not ours:
                    load(module, optimizer, state)
                    model = DistributedDataParallel(module)
                else:
                    model, optimizer = ab.wrap(module, optimizer, **SMALL)
                    load(module, optimizer, state)
                losses += train(model, optimizer, rank, steps)
                state = saved(module, optimizer)  # right after step(): updates are still pending
                if ours and stretch == 1:
                    ab.shutdown(module)
            outcomes.append((losses, torch.load(io.BytesIO(state), weights_only=True)))
        assert_same(outcomes[1], outcomes[0])
        assert list(outcomes[1][1]["model"]) == list(start[0].state_dict())


def check_loading_before_wrap(rank: int) -> None:
    import autobyte.torch as ab

    torch.manual_seed(3)
    module, optimizer = build()
    train(module, optimizer, 0, range(3))
    checkpoint = saved(module, optimizer)
    outcomes = []
    for ours in (False, True):
        module, optimizer = build()
        load(module, optimizer, checkpoint)
        model = ab.wrap(module, optimizer, **SMALL)[0] if ours else DistributedDataParallel(module)
        outcomes.append((train(model, optimizer, rank, range(3, 6)), state_of(module, optimizer)))
        ab.shutdown()
    assert_same(outcomes[1], outcomes[0])


def check_loading_in_mid_run(rank: int) -> None:
    """Back to an earlier state, with an update pending when it is loaded, and one of them only."""

    def loop(model, module, optimizer):
        losses = train(model, optimizer, rank, range(2))
        early = saved(module, optimizer)
        losses += train(model, optimizer, rank, range(2, 4))
        load(module, optimizer, early)
        losses += train(model, optimizer, rank, range(4, 6))
        module.load_state_dict(torch.load(io.BytesIO(early), weights_only=True)["model"])
        losses += train(model, optimizer, rank, range(6, 7))
        optimizer.load_state_dict(torch.load(io.BytesIO(early), weights_only=True)["optimizer"])
        losses += train(model, optimizer, rank, range(7, 9))
        optimizer.state = defaultdict(dict)  # momentum is forgotten, with an update pending
        losses += train(model, optimizer, rank, range(9, 11))
        return losses, len(optimizer.state)

    compare(rank, build, loop)


def check_a_state_dict_is_a_snapshot_of_finished_values(rank: int) -> None:
    def loop(model, module, optimizer):
        out = []
        for step in range(3):
            train(model, optimizer, rank, range(step, step + 1))
            out.append(copy.deepcopy(optimizer.state_dict()) if step % 2 else copy.deepcopy(module.state_dict()))
        return out

    compare(rank, build, loop)


def check_after_shutdown_the_model_is_plain(rank: int) -> None:
    import autobyte.torch as ab

    module, optimizer = build()
    keys = set(vars(module)) - {"no_sync"}
    ab.wrap(module, optimizer, **SMALL)
    train(module, optimizer, rank, range(2))
    ab.shutdown(module)
    assert set(vars(module)) - {"no_sync"} == keys
    assert type(module[0]._parameters) is dict
    assert type(optimizer.state).__name__ == "defaultdict"
    assert not module._forward_pre_hooks and not module[0]._forward_pre_hooks and not module._forward_hooks
    assert "zero_grad" not in vars(optimizer)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    twin, own = copy.deepcopy((module, optimizer))
    for m, o in ((module, optimizer), (twin, own)):
        with m.no_sync() if hasattr(m, "no_sync") else torch.enable_grad():
            pass
        train(m, o, 0, range(2, 4))
    assert_same(state_of(module, optimizer), state_of(twin, own))


def check_wrapping_anew(rank: int) -> None:
    import autobyte.torch as ab

    def loop(model, module, optimizer):
        losses = train(model, optimizer, rank, range(3))
        if model is module:
            ab.shutdown(module)
            ab.wrap(module, optimizer, partition=4096)
        else:
            model = DistributedDataParallel(module)
        return losses + train(model, optimizer, rank, range(3, 6))

    compare(rank, build, loop)


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_checkpoint(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]
