"""Parameters without a gradient: as DDP(find_unused_parameters=True) handles them, and never a hang."""

from __future__ import annotations

import pytest
import torch
from checks import adam, batch, compare, mlp, names_of_checks, raises, run_checks, sgd
from torch import nn

pytestmark = pytest.mark.slow

STEPS = 6
UNUSED = {"find_unused_parameters": True}
PLANS = ({"partition": 256, "fusion": 0}, {"partition": "1MiB", "fusion": "1MiB"}, {"partition": 1024, "fusion": 512, "credit": 128})


class Heads(nn.Module):
    """A trunk and heads, of which the call chooses."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)  # comes first and is used last, if at all
        self.trunk = mlp(12, 24, 24)
        self.heads = nn.ModuleList(nn.Linear(24, 4) for _ in range(heads))

    def forward(self, x, heads=(), first=False):
        h = self.trunk(x)
        if first:
            h = h + self.first(x)
        out = h.square().mean()
        for i in heads:
            out = out + self.heads[i](h).square().mean()
        return out


def make_adam():
    model = Heads()
    return model, adam(model.parameters())


def make_sgd():
    model = Heads()
    return model, sgd(model.parameters())


def gradients(module) -> dict:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def compare_choices(rank: int, choose, *, zero=True, read=False) -> None:
    """choose(step, rank) gives the heads, and whether the first layer is used."""

    def loop(model, module, optimizer):
        seen = []
        for step in range(STEPS):
            if zero:
                optimizer.zero_grad()
            heads, first = choose(step, rank)
            model(batch(rank, step, 5, 12), heads, first).backward()
            if read:
                seen.append(gradients(module))
            optimizer.step()
            if read == "after":
                seen.append(gradients(module))
        return seen

    for plan in PLANS:
        for make in (make_adam, make_sgd):
            compare(rank, make, loop, ddp=UNUSED, **plan)


def check_unused_on_all_ranks(rank: int) -> None:
    """Its gradient stays None, it is not updated, and Adam has no state for it."""
    compare_choices(rank, lambda step, rank: ((0,), False))
    compare_choices(rank, lambda step, rank: ((0,), False), read=True)

    def loop(model, module, optimizer):
        model(batch(rank, 0, 5, 12), (0,)).backward()
        optimizer.step()
        unused = module.heads[2].weight
        assert unused.grad is None
        assert unused not in optimizer.state
        return len(optimizer.state)

    compare(rank, make_adam, loop, ddp=UNUSED)


def check_unused_on_one_rank(rank: int) -> None:
    compare_choices(rank, lambda step, rank: ((0, 1) if rank == 0 else (0,), False))
    compare_choices(rank, lambda step, rank: ((0, 1) if rank == 1 else (0,), rank == 1))


def check_unused_on_one_rank_and_read(rank: int) -> None:
    compare_choices(rank, lambda step, rank: ((0, 1) if rank == 0 else (2,), rank == 0), read=True)
    compare_choices(rank, lambda step, rank: ((0, 1) if rank == 0 else (2,), rank == 0), read="after")


def check_alternating(rank: int) -> None:
    """Between ranks and between steps, with steps in which nobody uses a head, and some in which all are used."""
    patterns = [((0,), (1,)), ((1,), (0,)), ((), ()), ((0, 1, 2), (2,)), ((2,), (2,)), ((0, 1, 2), (0, 1, 2))]
    compare_choices(rank, lambda step, rank: (patterns[step % 6][rank], step % 3 == rank))
    compare_choices(rank, lambda step, rank: (patterns[step % 6][rank], step % 3 == rank), read=True)


def check_stale_gradients(rank: int) -> None:
    """Gradients that nobody zeroes: a parameter unused everywhere keeps its own, and is updated by it."""
    patterns = [((0, 1, 2), (0, 1, 2)), ((0,), (1,)), ((1,), (1,)), ((), ()), ((2,), (0,)), ((0,), (0, 1))]
    compare_choices(rank, lambda step, rank: (patterns[step % 6][rank], step < 2), zero=False)
    compare_choices(rank, lambda step, rank: (patterns[step % 6][rank], step < 2), zero=False, read="after")


def check_zeroed_to_zero(rank: int) -> None:
    """zero_grad(set_to_none=False): an unused parameter has a gradient of zeros, which Adam's momentum feels."""

    def loop(model, module, optimizer):
        for step in range(STEPS):
            heads = ((0, 1), (0, 2))[rank] if step % 2 else (0, 1, 2)
            model(batch(rank, step, 5, 12), heads).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    compare(rank, make_adam, loop, ddp=UNUSED)


def check_clipping_with_unused(rank: int) -> None:
    def loop(model, module, optimizer):
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(rank, step, 5, 12), ((0,), (1,))[rank]).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05))
            optimizer.step()
        return norms

    for plan in PLANS:
        compare(rank, make_adam, loop, ddp=UNUSED, **plan)


def check_a_parameter_outside_the_optimizer(rank: int) -> None:
    """It is averaged and never updated; dropping its gradient every step leaves nothing behind."""
    from autobyte.torch.session import sessions

    def make():
        model = Heads()
        return model, adam(model.trunk.parameters())

    def loop(model, module, optimizer):
        out = []
        for step in range(40):
            module.zero_grad()
            model(batch(rank, step, 5, 12), (0,)).backward()
            optimizer.step()
            if step % 5 == 4:
                out.append(gradients(module))
        if module in sessions:
            assert len(sessions[module].flow._verdicts) < 5, "verdicts of old passes pile up"
        return out

    compare(rank, make, loop, ddp=UNUSED)


def check_dropped_before_step(rank: int) -> None:
    """Gradients that came from one rank only are dropped between backward and step() on both."""

    def by_zero_grad(module, optimizer):
        optimizer.zero_grad()

    def one_by_one(module, optimizer):
        for p in module.parameters():
            p.grad = None

    def to_zero(module, optimizer):
        module.zero_grad(set_to_none=False)

    for drop in (by_zero_grad, one_by_one, to_zero):

        def loop(model, module, optimizer, drop=drop):
            for step in range(STEPS):
                optimizer.zero_grad()
                model(batch(rank, step, 5, 12), ((0,), (1,))[rank]).backward()
                if step % 2:
                    drop(module, optimizer)
                optimizer.step()

        compare(rank, make_adam, loop, ddp=UNUSED)


def check_dropped_gradients_leave_nothing_behind(rank: int) -> None:
    import autobyte.torch as ab
    from autobyte.torch.session import sessions

    model = Heads()
    model, optimizer = ab.wrap(model, sgd(model.parameters()))
    for step in range(40):
        model(batch(rank, step, 5, 12), (step % 3,)).backward()
        optimizer.zero_grad()
    assert len(sessions[model].flow._verdicts) < 5, sessions[model].flow._verdicts.keys()


def check_a_rank_that_skips_backward(rank: int) -> None:
    """Ranks that don't run the same backward passes are told so; nobody hangs and nothing is mixed up silently."""
    import autobyte.torch as ab

    for lazy in (0, 1):
        model = Heads()
        model, optimizer = ab.wrap(model, sgd(model.parameters()), timeout=5)
        with raises(ab.AutoByteError, "backward"):
            for step in range(4):
                loss = model(batch(rank, step, 5, 12), (0, 1, 2), True)
                if step != 1 or rank != lazy:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            ab.synchronize(model)
        try:
            ab.shutdown(model)
        except ab.AutoByteError:
            pass
        torch.distributed.barrier()


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_absent(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]
