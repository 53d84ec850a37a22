"""Optimizers, schedulers and scalers do what they do without AutoByte; what can't be split keeps the barrier."""

from __future__ import annotations

import copy

import pytest
import torch
from checks import adam, batch, compare, loss_of, mlp, names_of_checks, raises, run_checks, sgd
from torch.optim import lr_scheduler

pytestmark = pytest.mark.slow

STEPS = 5


def train(model, optimizer, rank, steps=STEPS, after=lambda step: None) -> list:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step, 6, 12))
        loss.backward()
        optimizer.step()
        after(step)
        losses.append(loss.item())
    return losses


class Lion(torch.optim.Optimizer):
    """A custom optimizer as users write them: no hooks, no foreach, state made in step()."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                b1, b2 = group["betas"]
                p.add_(torch.sign(state["average"] * b1 + p.grad * (1 - b1)), alpha=-group["lr"])
                state["average"].mul_(b2).add_(p.grad, alpha=1 - b2)


class GlobalNorm(torch.optim.Optimizer):
    """Scales every update by the norm over all parameters: can't be split."""

    def __init__(self, params, lr=0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not parameters:
            return
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad / (norm + 1e-6), alpha=self.param_groups[0]["lr"])


class Counting(torch.optim.Optimizer):
    """Keeps a count on itself, which parts of a step would advance too often; it matters late."""

    def __init__(self, params, lr=0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (0.1 if self.count > 15 else 1))


class Decaying(torch.optim.SGD):
    """Changes parameters that have no gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        return super().step(closure)


class Derived(torch.optim.Adam):
    """Calls its base class's step, which may have hooks of its own, and goes on with what that left."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.clamp_(-0.2, 0.2)
        return loss


SPLIT = {
    "adagrad": None, "adadelta": True, "adamax": True, "nadam": True, "radam": True, "asgd": True, "rprop": True,
    "adafactor": True, "amsgrad": True, "capturable-lr": True, "lion": True, "global norm": False, "counting": False,
    "decaying": False, "derived": True, "maximize": True, "differentiable": None,
}  # fmt: skip


def optimizers() -> dict:
    """By name; whether the step is split must be as in SPLIT, where that says."""
    o = torch.optim
    return {
        "adagrad": lambda p: o.Adagrad(p, lr=0.05),
        "adadelta": lambda p: o.Adadelta(p, lr=0.5),
        "adamax": lambda p: o.Adamax(p, lr=0.01),
        "nadam": lambda p: o.NAdam(p, lr=0.01),
        "radam": lambda p: o.RAdam(p, lr=0.01),
        "asgd": lambda p: o.ASGD(p, lr=0.05),
        "rprop": lambda p: o.Rprop(p, lr=0.01),
        "adafactor": lambda p: o.Adafactor(p, lr=0.01),
        "amsgrad": lambda p: o.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
        "capturable-lr": lambda p: o.AdamW(p, lr=torch.tensor(0.01), foreach=False),
        "lion": Lion,
        "global norm": GlobalNorm,
        "counting": Counting,
        "decaying": lambda p: Decaying(p, lr=0.1),
        "derived": lambda p: Derived(p, lr=0.05),
        "maximize": lambda p: o.SGD(p, lr=0.01, momentum=0.5, dampening=0.1, maximize=True),
        "differentiable": lambda p: o.SGD(p, lr=0.01, foreach=False, fused=True),
    }


def check_optimizers(rank: int) -> None:
    import autobyte.torch as ab

    plain = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # gives Adam.step, Derived's base, its hooks
    assert plain is not None
    for name, build in optimizers().items():

        def make(build=build):
            model = mlp()
            return model, build(model.parameters())

        def loop(model, module, optimizer, name=name):
            losses = train(model, optimizer, rank, 6)
            if model is module and SPLIT[name] is not None:
                assert ab.stats(model)["separable_optimizer"] == SPLIT[name], name
            return losses

        try:
            compare(rank, make, loop)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def check_muon(rank: int) -> None:
    if not hasattr(torch.optim, "Muon"):
        return

    def make():
        model = mlp()
        return model, torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)

    compare(rank, make, lambda model, module, optimizer: train(model, optimizer, rank))


def check_lbfgs(rank: int) -> None:
    """Closures run backward passes inside step(); what the line search sees is equal on all ranks."""

    def make():
        model = mlp()
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    def loop(model, module, optimizer):
        losses = []
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, batch(0, step, 6, 12))
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses

    compare(rank, make, loop)


def check_closures(rank: int) -> None:
    """SGD and Adam with closures, and steps with and without one by turns."""
    for build in (sgd, adam, lambda p: Derived(p, lr=0.05)):

        def make(build=build):
            model = mlp()
            return model, build(model.parameters())

        def loop(model, module, optimizer):
            losses = []
            for step in range(STEPS):

                def closure(step=step):
                    with torch.enable_grad():
                        optimizer.zero_grad()
                        loss = loss_of(model, batch(rank, step, 6, 12))
                        loss.backward()
                    return loss

                if step % 3 == 2:
                    losses.append(closure().item())
                    optimizer.step()
                else:
                    losses.append(optimizer.step(closure).item())
            return losses

        compare(rank, make, loop)


def check_schedulers(rank: int) -> None:
    def warmup(o):
        return lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4))

    def chained(o):
        first, second = lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)
        return lr_scheduler.SequentialLR(o, [first, second], milestones=[2])

    schedulers = (
        lambda o: lr_scheduler.StepLR(o, 2, 0.3),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        warmup,
        chained,
    )
    builds = (sgd, adam, lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False))
    for schedule in schedulers:
        for build in builds:
            for before_wrap in (False, True):

                def make(build=build, schedule=schedule, before_wrap=before_wrap):
                    model = mlp()
                    optimizer = build(model.parameters())
                    if before_wrap:
                        model.scheduler = schedule(optimizer)
                    return model, optimizer

                def loop(model, module, optimizer, schedule=schedule):
                    scheduler = getattr(module, "scheduler", None) or schedule(optimizer)
                    rates = []
                    train(model, optimizer, rank, STEPS, lambda _: (scheduler.step(), rates.append(float(scheduler.get_last_lr()[0]))))
                    return rates

                compare(rank, make, loop)


def check_a_plateau_scheduler_and_hand_set_rates(rank: int) -> None:
    def make():
        model = mlp()
        return model, sgd(model.parameters())

    def loop(model, module, optimizer):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

        def after(step):
            scheduler.step(1.0)
            if step == 3:
                optimizer.param_groups[0]["lr"] = 0.03
                optimizer.param_groups[0]["momentum"] = 0.5

        return train(model, optimizer, rank, STEPS, after)

    compare(rank, make, loop)


def check_groups_with_different_hyper_parameters(rank: int) -> None:
    def make(fused=False):
        model = mlp()
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.05, "weight_decay": 0.0}]
        return model, torch.optim.AdamW(groups, lr=0.01, fused=fused)

    def loop(model, module, optimizer):
        return train(model, optimizer, rank)

    compare(rank, make, loop)
    compare(rank, lambda: make(True), loop)


def check_add_param_group(rank: int) -> None:
    def make():
        model = mlp()
        return model, adam(model[0].parameters())

    def loop(model, module, optimizer):
        def after(step):
            if step == 1:
                optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 0.05})
            elif step == 3:
                optimizer.add_param_group({"params": module[4].parameters()})

        return train(model, optimizer, rank, 6, after)

    compare(rank, make, loop)


def check_a_foreign_parameter_added_later(rank: int) -> None:
    import autobyte.torch as ab

    model = mlp()
    model, optimizer = ab.wrap(model, adam(model.parameters()))
    train(model, optimizer, rank, 2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(7, 3))]})
    loss_of(model, batch(rank, 3, 6, 12)).backward()
    with raises(ab.AutoByteError, "group 1", "(7, 3)", "not in the wrapped model"):
        optimizer.step()


def check_grad_scaler(rank: int) -> None:
    """Steps are skipped when a gradient is not finite on any rank; fused optimizers unscale by themselves."""
    builds = (sgd, adam, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True))
    for build in builds:
        for unscale in (False, True):

            def make(build=build):
                model = mlp()
                return model, build(model.parameters())

            def loop(model, module, optimizer, unscale=unscale):
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
                out = []
                for step in range(7):
                    optimizer.zero_grad()
                    loss = loss_of(model, batch(rank, step, 6, 12))
                    if step in (1, 4) and rank == step % 2:
                        loss = loss * float("inf")
                    scaler.scale(loss).backward()
                    if unscale:
                        scaler.unscale_(optimizer)
                        out.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5).nan_to_num())
                    scaler.step(optimizer)
                    scaler.update()
                    out.append(scaler.get_scale())
                assert out.count(512.0) >= 1
                return out

            compare(rank, make, loop)


def check_freezing_in_mid_training(rank: int) -> None:
    """Layers are frozen and unfrozen between steps; DDP, which can't follow, is wrapped anew each time."""
    from torch.nn.parallel import DistributedDataParallel

    plan = {2: [0], 4: [0, 2], 6: [], 7: [4]}  # step -> layers that are frozen from there on
    for build in (sgd, adam):

        def make(build=build):
            model = mlp()
            return model, build(model.parameters())

        def loop(model, module, optimizer):
            call = model
            for step in range(9):
                if step in plan:
                    for i in (0, 2, 4):
                        module[i].requires_grad_(i not in plan[step])
                    if model is not module:
                        call = DistributedDataParallel(module)
                optimizer.zero_grad()
                loss_of(call, batch(rank, step, 6, 12)).backward()
                optimizer.step()

        compare(rank, make, loop)
        compare(rank, make, loop, partition="1MiB", fusion="1MiB")


def check_frozen_from_the_start(rank: int) -> None:
    def make():
        model = mlp()
        model[0].requires_grad_(False)
        return model, adam(p for p in model.parameters() if p.requires_grad)

    compare(rank, make, lambda model, module, optimizer: train(model, optimizer, rank))


def check_an_exception_in_step(rank: int) -> None:
    """Training goes on after a step() that failed, as it would without us."""
    import autobyte.torch as ab

    def loop(model, module, optimizer):
        def fail(*_):
            if armed:
                raise ZeroDivisionError

        optimizer.register_step_pre_hook(fail)
        armed: list = []
        train(model, optimizer, rank, 2)
        armed.append(1)
        optimizer.zero_grad()
        loss_of(model, batch(rank, 10, 6, 12)).backward()
        with raises(ZeroDivisionError):
            optimizer.step()
        armed.clear()
        return train(model, optimizer, rank, 3)

    def make():
        model = mlp()
        return model, adam(model.parameters())

    compare(rank, make, loop)
    assert ab is not None


def check_copies_of_hyper_parameters(rank: int) -> None:
    """What the user reads from param_groups is the user's own: no slices of ours show."""
    import autobyte.torch as ab

    model = mlp()
    optimizer = adam(model.parameters())
    groups, before = optimizer.param_groups, copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    ab.wrap(model, optimizer)
    train(model, optimizer, rank)
    assert optimizer.param_groups is groups and len(groups[0]["params"]) == 6
    assert [{k: v for k, v in g.items() if k != "params"} for g in groups] == before


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_optim(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]
