"""Communication starts in the backward pass and crosses the barrier at step()."""

from __future__ import annotations

import time

import pytest
import torch
from checks import batch, loss_of, mlp, names_of_checks, run_checks

pytestmark = pytest.mark.slow

KIB = 1 << 10
MIB = 1 << 20


class Sampler(torch.autograd.Function):
    """Calls back when the backward pass comes by, before the gradients of what is below are computed."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


def check_bytes_move_before_backward_ends(rank: int) -> None:
    """The last layer's partitions are reduced while the first layer's gradient is not even computed."""
    import time

    import autobyte.torch as ab

    first, last = mlp(64, 64), mlp(64, 2 * MIB // 256)
    model = torch.nn.Sequential(first, last)
    model, optimizer = ab.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), partition=256 * KIB, fusion=0)
    seen = []

    def sample() -> None:
        deadline = time.monotonic() + 20
        while True:
            stats = ab.stats(model)
            reduced = stats["reduced_bytes"] - stats["held_bytes"]
            if reduced >= 2 * MIB or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        seen.append(reduced)

    hidden = Sampler.apply(first(batch(rank, 0, 4, 64)), sample)
    with torch.no_grad():
        model(batch(rank, 0, 4, 64))  # the order of use, as a forward pass of the whole model
    last(hidden).square().mean().backward()
    assert len(seen) == 1
    assert seen[0] >= 2 * MIB, f"{seen[0]} bytes were reduced before backward ended"
    optimizer.step()


def check_bytes_move_after_step_has_returned(rank: int) -> None:
    """With 64 MB that become ready at the very end of backward, step() returns long before they are reduced."""
    import autobyte.torch as ab

    model = mlp(1024, 16 * KIB, 1)
    model, optimizer = ab.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3), partition=MIB, credit=4 * MIB)
    before = model[0].weight.detach().clone()
    for step in range(3):
        start = ab.stats(model)["reduced_bytes"]
        loss_of(model, batch(rank, step, 2, 1024)).backward()
        optimizer.step()
        stats = ab.stats(model)
        handed_out = stats["reduced_bytes"] - start
        assert handed_out - stats["held_bytes"] < 64 * MIB, "everything was reduced when step() returned"
        assert stats["pending_updates"] == 4, stats
        ab.synchronize(model)
        end = ab.stats(model)
        assert end["reduced_bytes"] - start > 64 * MIB
        assert end["pending_updates"] == 0 and end["held_bytes"] == 0, end
        assert not torch.equal(before, model[0].weight)
        before = model[0].weight.detach().clone()


def check_held_bytes_never_exceed_the_credit(rank: int) -> None:
    import autobyte.torch as ab

    model = mlp(1024, 8 * KIB, 1)
    model, optimizer = ab.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3), partition=64 * KIB, fusion=0, credit=128 * KIB)
    most = 0
    for step in range(2):
        loss_of(model, batch(rank, step, 2, 1024)).backward()
        optimizer.step()
        deadline = time.monotonic() + 30  # another rank may be late
        while not most and time.monotonic() < deadline:
            most = ab.stats(model)["held_bytes"]
        for _ in range(200):
            most = max(most, ab.stats(model)["held_bytes"])
    assert 0 < most <= 128 * KIB, most


def check_the_first_layer_goes_first(rank: int) -> None:
    """When the gate of the first layer opens, later layers are still pending."""
    import autobyte.torch as ab

    model = mlp(8, 8, 4 * KIB, KIB, 1)
    model, optimizer = ab.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3), partition=256 * KIB, credit=MIB)
    pending = []
    for step in range(5):
        loss_of(model, batch(rank, step, 2, 8)).backward()
        optimizer.step()
        _ = model[0].weight
        pending.append(ab.stats(model)["pending_updates"])
        _ = list(model.parameters())
        assert ab.stats(model)["pending_updates"] == 0
    # On a busy machine the later layers may be reduced as well before this thread comes to look.
    assert any(0 < count < 8 for count in pending), pending


def check_a_barrier_optimizer_overlaps_with_backward_only(rank: int) -> None:
    import autobyte.torch as ab

    model = mlp(256, 1024, 1)
    model, optimizer = ab.wrap(model, torch.optim.LBFGS(model.parameters(), max_iter=1), partition=64 * KIB)
    assert not ab.stats(model)["separable_optimizer"]

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch(0, 0, 2, 256))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert ab.stats(model)["pending_updates"] == 0


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_overlap(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]
