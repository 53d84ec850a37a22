"""wrap(): its options and errors, groups of ranks, one rank, and AUTOBYTE=0."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import pytest
import torch
import torch.distributed as dist
from checks import (
    SMALL,
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
    state_of,
)
from ranks import Ranks, init_gloo, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.slow


def make():
    model = mlp()
    return model, adam(model.parameters())


def train(model, optimizer, seed, steps=range(4)) -> list:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, batch(seed, step, 6, 12))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Records(logging.Handler):
    """What AutoByte logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")

    def __enter__(self):
        logging.getLogger("autobyte").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("autobyte").removeHandler(self)


@contextlib.contextmanager
def environment(**variables: str):
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_the_same_objects_come_back(rank: int) -> None:
    import autobyte.torch as ab

    model, optimizer = make()
    keys, repr_before = list(model.state_dict()), repr(model)
    wrapped = ab.wrap(model, optimizer)
    assert wrapped[0] is model and wrapped[1] is optimizer
    assert list(model.state_dict()) == keys and repr(model) == repr_before and type(model) is nn.Sequential


def check_bad_option_values(rank: int) -> None:
    """The message has what was given and what is allowed, for arguments and variables alike."""
    import autobyte.torch as ab

    cases = {
        "partition": ("4 parsecs", "-1", "0", "1.5", "many", "63"),
        "credit": ("0", "1e9", ""),
        "fusion": ("-4KiB", "x"),
        "engine": ("native", "mpi"),
        "policy": ("random",),
        "timeout": ("soon", "0", "-3", "nan"),
    }
    allowed = {
        "partition": "'4MiB'", "credit": "'4MiB'", "fusion": "'4MiB'", "engine": "'external'", "policy": "'fifo'", "timeout": "seconds",
    }  # fmt: skip
    model, optimizer = make()
    for name, values in cases.items():
        for value in values:
            if value == "":
                continue  # an empty variable is as good as none
            with raises(ValueError, f"{name}={value!r}", allowed[name]):
                ab.wrap(model, optimizer, **{name: value})
            variable = f"AUTOBYTE_{name.upper()}"
            with environment(**{variable: value}), raises(ValueError, f"{variable}={value!r}", allowed[name]):
                ab.wrap(model, optimizer)
    with environment(AUTOBYTE="maybe"), raises(ValueError, "AUTOBYTE='maybe'", "0 and 1"):
        ab.wrap(model, optimizer)
    with environment(AUTOBYTE_PORT="99999"), raises(ValueError, "AUTOBYTE_PORT='99999'", "65535"):
        ab.wrap(model, optimizer)
    with environment(AUTOBYTE_PARTITION=""):
        ab.wrap(model, optimizer)


def check_wrong_objects(rank: int) -> None:
    import autobyte.torch as ab

    model, optimizer = make()
    with raises(TypeError, "Module"):
        ab.wrap([1], optimizer)
    with raises(TypeError, "Optimizer"):
        ab.wrap(model, "adam")
    for outer in (lambda m: DistributedDataParallel(m), lambda m: nn.Sequential(DistributedDataParallel(m))):
        with raises(ValueError, "DistributedDataParallel", "remove"):
            ab.wrap(outer(mlp()), optimizer)
    stranger = adam([*model.parameters(), nn.Parameter(torch.zeros(3, 7))])
    with raises(ValueError, "parameter 6", "(3, 7)", "not in the model"):
        ab.wrap(model, stranger)
    with raises(ValueError, "0.weight", "forward"):
        lazy = nn.Sequential(nn.LazyLinear(3))
        ab.wrap(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    frozen = mlp().requires_grad_(False)
    with raises(ValueError, "requires a gradient"):
        ab.wrap(frozen, sgd(frozen.parameters()))
    meta = mlp().to("meta")
    with raises(ValueError, "meta"):
        ab.wrap(meta, sgd(meta.parameters()))
    for call in (ab.stats, ab.synchronize, ab.configure):
        with raises(ValueError, "not wrapped"):
            call(model)
    ab.shutdown(model)  # nothing to do


def check_wrapped_twice(rank: int) -> None:
    import autobyte.torch as ab

    model, optimizer = make()
    ab.wrap(model, optimizer)
    with raises(ValueError, "wrapped already", "shutdown"):
        ab.wrap(model, optimizer)
    with raises(ValueError, "wrapped already"):
        ab.wrap(nn.Sequential(model), optimizer)
    part = model[0]
    with raises(ValueError, "weight", "another wrapped model"):
        ab.wrap(part, sgd(part.parameters()))
    before = threading.active_count()
    with raises(ValueError, "0.weight", "another wrapped model"):
        again = nn.Sequential(part, nn.Linear(24, 2))
        ab.wrap(again, sgd(again.parameters()))
    assert threading.active_count() == before, "a refused wrap() left a thread"
    train(model, optimizer, rank)
    ab.shutdown(model)
    ab.wrap(model, optimizer)
    train(model, optimizer, rank)


def check_different_models(rank: int) -> None:
    """Every rank names the first tensor that differs; wrapping the right one afterwards works."""
    import autobyte.torch as ab

    def wrap(model):
        ab.wrap(model, sgd(model.parameters()))

    norm = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4))
    no_buffers = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4, track_running_stats=False))
    frozen = mlp()
    frozen[2].requires_grad_(False)
    cases = [
        ((mlp(12, 24, 5), mlp(12, 25, 5)), "0.weight"),
        ((mlp(12, 24, 5), mlp(12, 24, 24, 5)), "2.weight"),
        ((mlp(12, 24, 5), mlp(12, 24, 5).double()), "0.weight"),
        ((mlp(), frozen), "2.weight"),
        ((norm, no_buffers), "running_mean"),
        ((mlp(12, 24, 5), nn.ModuleDict({"x": mlp(12, 24, 5)})), "0.weight"),
    ]
    for models, name in cases:
        with raises(ab.AutoByteError, name):
            wrap(models[rank])
        dist.barrier()
    model, optimizer = make()
    ab.wrap(model, optimizer)
    train(model, optimizer, rank)


def check_settings(rank: int) -> None:
    """Argument beats environment beats default; rank 0's settings hold, and where they differ is logged."""
    import autobyte.torch as ab

    def settings(**arguments) -> dict:
        model, optimizer = make()
        ab.wrap(model, optimizer, **arguments)
        out = ab.stats(model)["settings"]
        train(model, optimizer, rank, range(1))
        ab.shutdown(model)
        return out

    default = settings()
    assert default["partition"] >= 1 << 16 and default["credit"] >= default["partition"] and default["policy"] == "priority", default
    with environment(AUTOBYTE_PARTITION="2MiB", AUTOBYTE_FUSION="0", AUTOBYTE_POLICY="fifo"):
        found = settings(partition="512KiB", credit=123456)
    assert (found["partition"], found["credit"], found["fusion"], found["policy"]) == (512 << 10, 123456, 0, "fifo"), found

    with Records() as records:
        found = settings(partition=4096 if rank == 0 else 8192, engine="external")
    assert found["partition"] == 4096
    warnings = [text for text in records.texts if "8192" in text and "4096" in text]
    assert len(warnings) == rank, records.texts

    with environment(**({"AUTOBYTE_CREDIT": "64KiB"} if rank == 0 else {})):
        assert settings()["credit"] == 64 << 10


def check_configure(rank: int) -> None:
    import autobyte.torch as ab

    def loop(model, module, optimizer):
        losses = train(model, optimizer, rank, range(2))
        if model is module:
            before = ab.stats(model)["partitions_per_step"]
            ab.configure(model, partition=128, fusion=0)
            losses += train(model, optimizer, rank, range(2, 4))
            after = ab.stats(model)
            assert after["partitions_per_step"] > before and after["settings"]["partition"] == 128, after
            with raises(ValueError, "partition='x'"):
                ab.configure(model, partition="x")
        else:
            losses += train(model, optimizer, rank, range(2, 4))
        return losses

    compare(rank, make, loop)


def check_stats(rank: int) -> None:
    import autobyte.torch as ab

    model, optimizer = make()
    ab.wrap(model, optimizer, **SMALL)
    train(model, optimizer, rank, range(3))
    ab.synchronize(model)
    stats = ab.stats(model)
    size = sum(p.numel() * 4 for p in model.parameters())
    assert stats["rank"] == rank and stats["world_size"] == 2
    assert stats["steps"] == 3 and stats["backward_passes"] == 3
    assert stats["reduced_bytes"] >= 3 * size
    assert stats["partitions"] == 3 * stats["partitions_per_step"]


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_wrap(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]


# -- groups of ranks


def train_in_groups(rank: int, world: int) -> None:
    """Ranks 0 and 1 train one model, 2 and 3 another, as DDP does with its process_group; rank 4 alone."""
    import autobyte.torch as ab

    init_gloo(20)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [4])]
    group = groups[rank // 2]
    with raises(ab.AutoByteError, "not a member"):
        model, optimizer = make()
        ab.wrap(model, optimizer, process_group=groups[(rank // 2 + 1) % 3])
    if rank < 4:
        widths = ((12, 24, 5), (12, 30, 30, 5))[rank // 2]

        def make_own():
            model = mlp(*widths)
            return model, adam(model.parameters())

        compare(rank, make_own, lambda model, module, optimizer: train(model, optimizer, rank), ddp={"process_group": group}, process_group=group)
    else:
        model, optimizer = make()
        ab.wrap(model, optimizer, process_group=group)
        train(model, optimizer, rank)
        with model.no_sync():
            ab.synchronize(model)
            ab.configure(model, partition=4096)
        assert ab.stats(model)["world_size"] == 1
    # All of them at last, in one model.
    model, optimizer = make()
    ab.wrap(model, optimizer)
    train(model, optimizer, rank)
    everyones = [torch.empty_like(model[0].weight) for _ in range(world)]
    dist.all_gather(everyones, model[0].weight.detach())
    assert all(torch.equal(everyones[0], other) for other in everyones)
    ab.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def test_groups_of_ranks() -> None:
    run_ranks(train_in_groups, 5)


# -- one rank


def train_alone(rank: int, world: int) -> None:
    import autobyte.torch as ab

    model, optimizer = make()
    with raises(ab.AutoByteError, "init_process_group"):
        ab.wrap(model, optimizer)
    init_gloo(20)
    threads = threading.active_count()
    attributes = set(vars(model)) | set(vars(optimizer))
    result = ab.wrap(model, optimizer)
    assert result[0] is model and result[1] is optimizer
    assert threading.active_count() == threads
    assert (set(vars(model)) | set(vars(optimizer))) - {"no_sync"} == attributes
    assert type(model[0]._parameters) is dict and "grad" not in nn.Parameter.__dict__
    assert not model._forward_pre_hooks and not model[0]._forward_pre_hooks and not optimizer._optimizer_step_pre_hooks
    assert "libautobyte" not in open("/proc/self/maps").read()
    with model.no_sync():
        train(model, optimizer, 0)
    ab.synchronize(model)
    ab.configure(model, partition="1MiB")
    assert ab.stats(model)["world_size"] == 1
    with raises(ValueError, "wrapped already"):  # as on more ranks
        ab.wrap(model, optimizer)
    ab.shutdown(model)
    ab.wrap(model, optimizer)
    ab.shutdown()
    dist.destroy_process_group()


def test_one_rank() -> None:
    run_ranks(train_alone, 1)


# -- the end of the process


def leave(rank: int, world: int, how: str) -> None:
    """Ends with an update pending and nothing shut down."""
    import autobyte.torch as ab

    init_gloo(20)
    model, optimizer = make()
    ab.wrap(model, optimizer, **SMALL)
    train(model, optimizer, rank)
    if how == "destroyed":
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["left", "destroyed"])
@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("world", [1, 2])
def test_exit(how: str, switch: str, world: int) -> None:
    with Ranks(leave, world, how, env={"AUTOBYTE": switch}) as ranks:
        for outcome in ranks.wait(60):
            assert outcome.returncode == 0, outcome.output
            for sign in ("at exit", "Traceback", "ERROR"):
                assert sign not in outcome.output, outcome.output


# -- switched off


def train_switched_off(rank: int, world: int) -> None:
    """Every way of training, with the scheduler off: equal to DDP, without the library."""
    import test_behaviour_absent as absent
    import test_behaviour_accumulate as accumulate

    import autobyte.torch as ab

    init_gloo(20)
    with Records() as records:
        compare(rank, make, lambda model, module, optimizer: train(model, optimizer, rank))
    assert len([text for text in records.texts if "AUTOBYTE=0" in text]) == (rank == 0), records.texts
    model, optimizer = make()
    ab.wrap(model, optimizer)
    with raises(ValueError, "wrapped already"):
        ab.wrap(model, optimizer)
    ab.synchronize(model)
    ab.configure(model, partition=4096)
    stats = ab.stats(model)
    assert (stats["rank"], stats["world_size"]) == (rank, 2), stats
    ab.shutdown(model)
    local = mlp()
    state = state_of(model, optimizer)
    loss_of(model, batch(rank, 0, 6, 12)).backward()  # plain again: gradients are this rank's own
    local.load_state_dict(state["model"])
    loss_of(local, batch(rank, 0, 6, 12)).backward()
    assert_same(model[0].weight.grad, local[0].weight.grad)

    for check in (absent.check_unused_on_one_rank_and_read, absent.check_alternating, accumulate.check_two_backward_passes):
        check(rank)
    for check in (accumulate.check_no_sync, accumulate.check_partial_losses, accumulate.check_adversaries_in_two_models):
        check(rank)
    assert "libautobyte" not in open("/proc/self/maps").read()
    dist.barrier()
    dist.destroy_process_group()


def test_switched_off() -> None:
    run_ranks(train_switched_off, 2, env={"AUTOBYTE": "0"})
