"""Several backward passes before one step(): no_sync(), partial losses, retained graphs, adversaries."""

from __future__ import annotations

import contextlib

import pytest
import torch
from checks import ManualAverage, adam, batch, compare, loss_of, mlp, names_of_checks, run_checks, sgd
from torch import nn

pytestmark = pytest.mark.slow

STEPS = 4
FUSED = {"partition": "1MiB", "fusion": "1MiB"}


def make_adam():
    model = mlp()
    return model, adam(model.parameters())


def make_sgd():
    model = mlp()
    return model, sgd(model.parameters())


def check_no_sync(rank: int) -> None:
    """Three micro-batches, of which the last is synchronized, in several iterations."""

    def loop(model, module, optimizer):
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                with model.no_sync() if part < 2 else contextlib.nullcontext():
                    (loss_of(model, batch(rank, 10 * step + part, 6, 12)) / 3).backward()
                if part == 0:
                    seen.append(module[0].weight.grad.clone())  # this rank's own
            seen.append([p.grad.clone() for p in module.parameters()])
            optimizer.step()
        return seen

    for options in ({}, FUSED):
        compare(rank, make_adam, loop, **options)
        compare(rank, make_sgd, loop, **options)


def check_no_sync_unread(rank: int) -> None:
    def loop(model, module, optimizer):
        for step in range(STEPS):
            for part in range(3):
                with model.no_sync() if part < 2 else contextlib.nullcontext():
                    (loss_of(model, batch(rank, 10 * step + part, 6, 12)) / 3).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)

    compare(rank, make_adam, loop)


def check_no_sync_around_the_forward_pass_only(rank: int) -> None:
    """DDP decides in the forward pass; AutoByte in the backward pass. Inside of both, both agree."""

    def loop(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, batch(rank, 100 + step, 6, 12)).backward()
                with model.no_sync():
                    loss_of(model, batch(rank, 200 + step, 6, 12)).backward()
                loss_of(model, batch(rank, 300 + step, 6, 12)).backward()
            loss_of(model, batch(rank, 400 + step, 6, 12)).backward()
            optimizer.step()

    compare(rank, make_sgd, loop)


def check_no_sync_after_a_synchronized_pass(rank: int) -> None:
    """A step with local gradients on top of averaged ones: the ranks drift apart, as with DDP."""

    def loop(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step, 6, 12)).backward()
            with model.no_sync():
                loss_of(model, batch(rank, 50 + step, 6, 12)).backward()
            optimizer.step()

    compare(rank, make_sgd, loop)


def check_no_sync_leaves_on_an_error(rank: int) -> None:
    import autobyte.torch as ab

    model, optimizer = make_sgd()
    ab.wrap(model, optimizer)
    with contextlib.suppress(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    loss_of(model, batch(rank, 0, 6, 12)).backward()
    both = [torch.empty_like(model[0].weight) for _ in range(2)]
    torch.distributed.all_gather(both, model[0].weight.grad)
    assert torch.equal(*both)


def check_two_backward_passes(rank: int) -> None:
    """Each with a forward pass of its own, over the same parameters."""

    def loop(model, module, optimizer):
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step, 6, 12)).backward()
            if step % 2:
                seen.append(module[2].weight.grad.clone())
            loss_of(model, batch(rank, 50 + step, 6, 12)).backward()
            optimizer.step()
        return seen

    for options in ({}, FUSED):
        compare(rank, make_adam, loop, **options)


def averaging_backward(model, loss, **options) -> None:
    """A backward pass whose sum is averaged, by hand where the model is the reference."""
    loss.backward(**options)
    if isinstance(model, ManualAverage):
        model.average()


def check_a_retained_graph(rank: int) -> None:
    """Twice backward through one graph; DDP averages only the first, which is not what anyone wants."""

    def loop(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            out = model(batch(rank, step, 6, 12))
            averaging_backward(model, out.square().mean(), retain_graph=True)
            averaging_backward(model, out.abs().mean())
            optimizer.step()

    compare(rank, make_adam, loop, reference=ManualAverage)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(12, 24, 24)
        self.left, self.right = nn.Linear(24, 4), nn.Linear(24, 4)

    def forward(self, x):
        h = self.trunk(x)
        return self.left(h), self.right(h)


def check_partial_losses(rank: int) -> None:
    """One backward pass for each head; the trunk gets gradients from both."""

    def make():
        model = TwoHeads()
        return model, adam(model.parameters())

    def loop(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            left, right = model(batch(rank, step, 6, 12))
            averaging_backward(model, left.square().mean(), retain_graph=True)
            averaging_backward(model, right.square().mean())
            optimizer.step()

    for options in ({}, FUSED):
        compare(rank, make, loop, reference=ManualAverage, **options)


class Disjoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(12, 24, 4), mlp(12, 24, 4)

    def forward(self, x, which):
        return (self.one, self.two)[which](x)


def check_disjoint_losses(rank: int) -> None:
    """Passes that share no parameter become one pass, and are averaged once each."""

    def make():
        model = Disjoint()
        return model, adam(model.parameters())

    def loop(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            for which in (0, 1):
                model(batch(rank, step + 50 * which, 6, 12), which).square().mean().backward()
            optimizer.step()

    compare(rank, make, loop, ddp={"find_unused_parameters": True})


class Adversaries(nn.Module):
    """A generator and a discriminator in one model, with one optimizer for both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(4, 16, 12), mlp(12, 16, 1)

    def forward(self, x, generate):
        return self.discriminator(self.generator(x) if generate else x)


def check_adversaries_in_one_model(rank: int) -> None:
    def make():
        model = Adversaries()
        return model, adam(model.parameters())

    def loop(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(rank, step, 6, 12), False).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(batch(rank, step, 6, 4), True).exp().mean().backward()
            optimizer.step()

    compare(rank, make, loop, ddp={"find_unused_parameters": True})


def check_adversaries_in_two_models(rank: int) -> None:
    """Two wrapped models and two optimizers; the discriminator is frozen by turns, or just gets gradients that are dropped."""
    from checks import SMALL, assert_same, state_of
    from torch.nn.parallel import DistributedDataParallel

    import autobyte.torch as ab

    for freeze in (False, True):
        outcomes = []
        for ours in (False, True):
            torch.manual_seed(5 + rank)
            modules = mlp(4, 16, 12), mlp(12, 16, 1)
            optimizers = [adam(m.parameters()) for m in modules]
            if ours:
                for pair in zip(modules, optimizers):
                    ab.wrap(*pair, **SMALL)
                generator, discriminator = modules
            else:
                generator, discriminator = (DistributedDataParallel(m) for m in modules)
            for step in range(STEPS):
                fake = generator(batch(rank, step, 6, 4))
                optimizers[1].zero_grad()
                loss = discriminator(batch(rank, step + 50, 6, 12)).exp().mean()
                (loss + discriminator(fake.detach()).square().mean()).backward()
                optimizers[1].step()
                if freeze:
                    modules[1].requires_grad_(False)
                optimizers[0].zero_grad()
                (modules[1] if not ours else discriminator)(fake).exp().mean().backward()
                optimizers[0].step()
                if freeze:
                    modules[1].requires_grad_(True)
            optimizers[1].zero_grad()
            outcomes.append([state_of(m, o) for m, o in zip(modules, optimizers)])
            ab.shutdown()
        assert_same(outcomes[1], outcomes[0])


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_accumulate(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]
