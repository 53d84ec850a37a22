"""Gradients as the user sees them: reading, zeroing, replacing and changing them, at every place of the loop."""

from __future__ import annotations

import pytest
import torch
from checks import (
    ManualAverage,
    adam,
    assert_same,
    batch,
    compare,
    loss_of,
    mlp,
    names_of_checks,
    raises,
    run_checks,
    sgd,
)

pytestmark = pytest.mark.slow

STEPS = 4


def make_sgd():
    model = mlp()
    return model, sgd(model.parameters())


def make_adam():
    model = mlp()
    return model, adam(model.parameters())


def averaged(loop):
    """The loop, with average() of a ManualAverage before each step()."""

    def run(model, module, optimizer):
        if isinstance(model, ManualAverage):
            optimizer.register_step_pre_hook(lambda *_: model.average())
        return loop(model, module, optimizer)

    return run


def read_all(module) -> list:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def check_reading_everywhere(rank: int) -> None:
    """After backward, after step, after zero_grad of either kind, after the next forward."""

    def loop(model, module, optimizer):
        seen = []
        for step in range(STEPS):
            loss = loss_of(model, batch(rank, step, 6, 12))
            seen.append(read_all(module))
            loss.backward()
            seen.append(read_all(module))
            optimizer.step()
            seen.append(read_all(module))
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            seen.append(read_all(module))
        return seen

    for make in (make_sgd, make_adam):
        compare(rank, make, loop)


def check_reading_one_place_only(rank: int) -> None:
    """Each place alone, since one read settles what another would find."""
    for place in ("backward", "step", "zero_grad", "forward"):

        def loop(model, module, optimizer, place=place):
            seen = []

            def at(where):
                if where == place:
                    seen.append(read_all(module))

            for step in range(STEPS):
                loss = loss_of(model, batch(rank, step, 6, 12))
                at("forward")
                optimizer.zero_grad()
                at("zero_grad")
                loss.backward()
                at("backward")
                optimizer.step()
                at("step")
            return seen

        compare(rank, make_sgd, loop)


def check_reading_one_parameter_only(rank: int) -> None:
    """One gradient is read, the others stay in flight."""

    def loop(model, module, optimizer):
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step, 6, 12)).backward()
            seen.append(module[step % 2 * 2].weight.grad.norm().item())
            optimizer.step()
        return seen

    compare(rank, make_adam, loop)


def check_zero_grad_at_every_place(rank: int) -> None:
    for where in ("before forward", "after forward", "after step"):
        for whose in ("optimizer", "model", "layer"):
            for to_none in (True, False):

                def loop(model, module, optimizer, where=where, whose=whose, to_none=to_none):
                    def zero(here):
                        if here != where:
                            return
                        if whose == "optimizer":
                            optimizer.zero_grad(set_to_none=to_none)
                        elif whose == "model":
                            module.zero_grad(set_to_none=to_none)
                        else:
                            module[0].zero_grad(set_to_none=to_none)

                    for step in range(STEPS):
                        zero("before forward")
                        loss = loss_of(model, batch(rank, step, 6, 12))
                        zero("after forward")
                        loss.backward()
                        optimizer.step()
                        zero("after step")

                compare(rank, make_sgd, loop)


def check_never_zeroed(rank: int) -> None:
    def loop(model, module, optimizer):
        for step in range(STEPS):
            loss_of(model, batch(rank, step, 6, 12)).backward()
            optimizer.step()

    compare(rank, make_sgd, loop)


def check_zeroed_between_backward_and_step(rank: int) -> None:
    """Dropped gradients are not applied, and momentum is left alone."""

    def loop(model, module, optimizer):
        for step in range(STEPS):
            loss_of(model, batch(rank, step, 6, 12)).backward()
            if step % 2:
                optimizer.zero_grad(set_to_none=step == 1)
            optimizer.step()

    compare(rank, make_sgd, loop)


def check_backward_zeroed_and_run_again(rank: int) -> None:
    def loop(model, module, optimizer):
        for step in range(STEPS):
            loss_of(model, batch(rank, step, 6, 12)).backward()
            optimizer.zero_grad()
            loss_of(model, batch(rank, step + 50, 6, 12)).backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(rank, make_adam, loop)


def check_gradients_set_to_none_one_by_one(rank: int) -> None:
    for where in ("before forward", "after forward", "after step"):

        def loop(model, module, optimizer, where=where):
            held = list(module.parameters())

            def zero(here):
                for p in held if here == where else ():
                    p.grad = None

            for step in range(STEPS):
                zero("before forward")
                loss = loss_of(model, batch(rank, step, 6, 12))
                zero("after forward")
                loss.backward()
                optimizer.step()
                zero("after step")

        compare(rank, make_adam, loop)


def check_gradients_deleted(rank: int) -> None:
    def loop(model, module, optimizer):
        for step in range(STEPS):
            loss_of(model, batch(rank, step, 6, 12)).backward()
            optimizer.step()
            for p in module.parameters():
                del p.grad

    compare(rank, make_sgd, loop)


def check_gradients_zeroed_in_place_after_step(rank: int) -> None:
    """p.grad.zero_() right after step() must not reach an update that is pending."""

    def loop(model, module, optimizer):
        held = list(module.parameters())
        for step in range(STEPS):
            loss_of(model, batch(rank, step, 6, 12)).backward()
            optimizer.step()
            for p in held:
                p.grad.detach_()
                p.grad.zero_()

    compare(rank, make_adam, loop)


def check_clipping(rank: int) -> None:
    def clip_norm(module):
        return torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    def clip_norm_foreach(module):
        return torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1, foreach=True)

    def clip_value(module):
        torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)

    def scale(module):
        for p in module.parameters():
            p.grad *= 0.3

    def scale_data(module):
        for p in module.parameters():
            p.grad.data.mul_(0.3)

    def noise(module):
        for p in module.parameters():
            p.grad.add_(torch.ones_like(p), alpha=0.01)

    def assign_data(module):
        for p in module.parameters():
            p.grad.data = p.grad.data * 0.5

    def replace(module):
        for p in module.parameters():
            p.grad = p.grad * 0.5 + 0.01

    def replace_first(module):
        module[0].weight.grad = torch.ones_like(module[0].weight)

    for change in (clip_norm, clip_norm_foreach, clip_value, scale, scale_data, assign_data, noise, replace, replace_first):

        def loop(model, module, optimizer, change=change):
            out = []
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, batch(rank, step, 6, 12)).backward()
                out.append(change(module))
                optimizer.step()
            return out

        compare(rank, make_adam, loop)
        compare(rank, make_sgd, loop)


def check_clipping_in_a_hook_of_the_optimizer(rank: int) -> None:
    """Hooks that the user puts on step() see finished gradients before it and finished weights after it."""
    for early in (True, False):

        def loop(model, module, optimizer, early=early):
            seen = []

            def clip(*_):
                seen.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))

            def after(*_):
                seen.append(module[2].weight.detach().clone())

            if not early:
                optimizer.register_step_pre_hook(clip)
                optimizer.register_step_post_hook(after)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, batch(rank, step, 6, 12)).backward()
                optimizer.step()
            return seen

        compare(rank, make_adam, loop)


def check_hooks_registered_before_wrap(rank: int) -> None:
    import copy

    import autobyte.torch as ab

    def clip(model) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    torch.manual_seed(0)
    outcomes = []
    base = mlp()
    for ours in (False, True):
        model = copy.deepcopy(base)
        optimizer = adam(model.parameters())
        seen = []
        optimizer.register_step_pre_hook(lambda *_, model=model: clip(model))
        optimizer.register_step_post_hook(lambda *_, model=model, seen=seen: seen.append(model[2].weight.detach().clone()))
        if ours:
            ab.wrap(model, optimizer)
            call = model
        else:
            call = torch.nn.parallel.DistributedDataParallel(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(call, batch(rank, step, 6, 12)).backward()
            optimizer.step()
        outcomes.append(seen)
    assert_same(outcomes[1], outcomes[0])


def check_reading_in_mid_backward_is_an_error(rank: int) -> None:
    import autobyte.torch as ab

    for action in (lambda p: p.grad, lambda p: setattr(p, "grad", None)):
        model = mlp()
        model, optimizer = ab.wrap(model, sgd(model.parameters()))
        loss_of(model, batch(rank, 0, 6, 12)).backward()
        optimizer.step()
        hidden = model[1](model[0](batch(rank, 0, 6, 12)))
        hidden.register_hook(lambda g, model=model, action=action: action(model[4].weight))
        out = model[4](model[3](model[2](hidden)))
        with raises(ab.AutoByteError, "4.weight", "backward"):
            out.sum().backward()
        ab.shutdown(model)


def check_users_own_gradient_hooks(rank: int) -> None:
    """Tensor hooks run before the average, as with DDP."""

    def loop(model, module, optimizer):
        for p in module.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step, 6, 12)).backward()
            optimizer.step()

    compare(rank, make_adam, loop)


def check_gradients_with_a_graph(rank: int) -> None:
    """A gradient penalty through autograd.grad, and backward(create_graph=True)."""

    def penalty(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(rank, step, 6, 12).requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            optimizer.step()

    def create_graph(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step, 6, 12)).backward(create_graph=True)
            optimizer.step()

    compare(rank, make_adam, averaged(penalty), reference=ManualAverage)
    compare(rank, make_adam, averaged(create_graph), reference=ManualAverage)


def check_autograd_grad_leaves_grad_alone(rank: int) -> None:
    def loop(model, module, optimizer):
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, batch(rank, step, 6, 12))
            seen.append(list(torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)))
            assert all(p.grad is None for p in module.parameters())
            loss.backward()
            optimizer.step()
        return seen

    compare(rank, make_sgd, averaged(loop), reference=ManualAverage)


def check_a_step_without_backward_and_two_steps(rank: int) -> None:
    def loop(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.step()  # nothing to do
            loss_of(model, batch(rank, step, 6, 12)).backward()
            optimizer.step()
            optimizer.step()  # the same gradients again

    compare(rank, make_adam, loop)


def check_grad_is_plain_again_after_shutdown(rank: int) -> None:
    import autobyte.torch as ab

    model = mlp()
    assert "grad" not in torch.nn.Parameter.__dict__
    model, optimizer = ab.wrap(model, sgd(model.parameters()))
    assert "grad" in torch.nn.Parameter.__dict__
    loss_of(model, batch(rank, 0, 6, 12)).backward()
    optimizer.step()
    ab.shutdown(model)
    assert "grad" not in torch.nn.Parameter.__dict__
    optimizer.zero_grad()
    loss_of(model, batch(rank, 1, 6, 12)).backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_grad(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]
