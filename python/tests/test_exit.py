"""How processes end when nothing went wrong, and what shutdown() leaves behind: nothing."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from forked import ForkedRanks
from ranks import Outcome, Ranks, init_gloo, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, sleep_s: float = 0) -> None:
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        inputs = torch.randn(8, 64, generator=generator)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if step == STEPS - 1:
            time.sleep(sleep_s)
        loss.backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


# -- the ends of scripts


def end(rank: int, world: int, how: str) -> list[torch.Tensor] | None:
    """A script that trains and ends in some way. Returns the weights where the script looks at them."""
    import autobyte.torch as ab

    init_gloo()
    module, optimizer = make()
    if how.startswith("ddp"):
        train(DistributedDataParallel(module), optimizer, rank)
    else:
        ab.wrap(module, optimizer, partition="64KiB", credit="128KiB")
        train(module, optimizer, rank, sleep_s=5 if how == "slow" and rank == 1 else 0)
    match how:
        case "slow":
            return weights(module) if rank == 1 else None  # rank 0 does not even wait for its last step
        case "unread":
            return None
        case "ddp, read" | "read":
            return weights(module)
        case "shutdown":
            ab.shutdown()
        case "destroy" | "ddp, destroy":
            dist.destroy_process_group()
        case "shutdown, destroy":
            ab.shutdown()
            dist.destroy_process_group()
        case "destroy, shutdown":
            dist.destroy_process_group()
            ab.shutdown()
    return weights(module)


def check_clean(outcomes: list[Outcome]) -> None:
    """Exit code 0, and nothing said but what AutoByte says at its start."""
    for outcome in outcomes:
        said = [line for line in outcome.output.splitlines() if not line.startswith("INFO autobyte: ")]
        assert (outcome.returncode, said) == (0, []), f"rank {outcome.rank}"


def run(how: str, world: int = 2, kind: type[Ranks] = ForkedRanks) -> list[Outcome]:
    with kind(end, world, how) as ranks:
        return ranks.wait(90)


@pytest.fixture(scope="module")
def reference() -> list[torch.Tensor]:
    """What DDP trains to, and that it ends cleanly here."""
    outcomes = run("ddp, read")
    check_clean(outcomes)
    return outcomes[0].result


def check_equal(result: list[torch.Tensor], reference: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(result, reference, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["read", "unread", "shutdown", "destroy", "shutdown, destroy", "destroy, shutdown", "slow"])
def test_scripts_end_cleanly(how: str, reference: list[torch.Tensor]) -> None:
    outcomes = run(how)
    check_clean(outcomes)
    read = [outcome.result for outcome in outcomes if outcome.result is not None]
    assert len(read) == {"unread": 0, "slow": 1}.get(how, 2)
    for result in read:
        check_equal(result, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "runs"), [(2, 20), (3, 6)])
def test_twenty_runs_end_no_worse_than_ddp(world: int, runs: int) -> None:
    """Start, train, exit, without a word to AutoByte or torch.distributed at the end."""
    for _ in range(runs):
        check_clean(run("unread", world))
    for _ in range(3):
        check_clean(run("ddp", world))


@pytest.mark.slow
def test_runs_of_their_own_interpreter_end_cleanly(reference: list[torch.Tensor]) -> None:
    """As above, without a shared start: a few runs, since each imports torch."""
    for how in ("read", "unread", "destroy"):
        outcomes = run(how, kind=Ranks)
        check_clean(outcomes)
        if how == "read":
            check_equal(outcomes[0].result, reference)


# -- what shutdown leaves behind


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled(measure, wanted: int) -> int:
    """A count, once it is down to what is wanted or has had time for it."""
    deadline = time.monotonic() + 5
    while measure() > wanted and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return measure()


def in_child(call) -> str:
    """What a forked child gets from a call, which must return: "ok", or its error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            call()
            text = "ok"
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text


def wrap_many_times(rank: int, world: int) -> dict[str, object]:
    import autobyte.torch as ab

    init_gloo()
    out: dict[str, object] = {}
    module, optimizer = make()
    keys = (list(module.__dict__), list(optimizer.__dict__))
    ab.wrap(module, optimizer)
    out["threads while wrapped"] = threads()
    train(module, optimizer, rank)
    out["forked child"] = in_child(lambda: ab.stats(module)), in_child(lambda: [p.grad for p in module.parameters()])
    ab.shutdown(module)
    out["threads after shutdown"] = threads()
    out["grad is a property"] = "grad" in nn.Parameter.__dict__
    out["attributes left"] = set(module.__dict__) - set(keys[0]) - {"no_sync"} | set(optimizer.__dict__) - set(keys[1])
    out["hooks left"] = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules())

    # Wrapped anew, the same objects go on where they were.
    reference, reference_optimizer = make()
    ddp = DistributedDataParallel(reference)
    train(ddp, reference_optimizer, rank)
    out["equal after shutdown"] = all(torch.equal(a, b) for a, b in zip(weights(module), weights(reference), strict=True))
    ab.wrap(module, optimizer)
    train(module, optimizer, rank)
    train(ddp, reference_optimizer, rank)
    ab.shutdown()
    out["equal after wrapping anew"] = all(torch.equal(a, b) for a, b in zip(weights(module), weights(reference), strict=True))
    del ddp, reference, reference_optimizer

    def once() -> None:
        fresh, fresh_optimizer = make()
        ab.wrap(fresh, fresh_optimizer)
        train(fresh, fresh_optimizer, rank)
        ab.shutdown()

    for _ in range(3):
        once()
    gc.collect()
    before = descriptors(), tasks()
    for _ in range(12):
        once()
    out["descriptors"] = before[0], settled(descriptors, before[0])
    out["tasks"] = before[1], settled(tasks, before[1])
    dist.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def left() -> list[dict[str, object]]:
    return run_ranks(wrap_many_times, 2)


def test_the_thread_ends_with_shutdown(left) -> None:
    for result in left:
        assert "autobyte-issue" in result["threads while wrapped"]
        assert not [name for name in result["threads after shutdown"] if name.startswith("autobyte")]


def test_a_forked_child_is_refused(left) -> None:
    """Though updates are pending that the read of a gradient would wait for."""
    for result in left:
        for text in result["forked child"]:
            assert text.startswith("AutoByteError: this process was forked")


def test_shutdown_leaves_the_model_as_it_was(left) -> None:
    for result in left:
        assert not result["grad is a property"]
        assert result["attributes left"] == set()
        assert result["hooks left"] == 0


def test_wrapping_anew_goes_on(left) -> None:
    for result in left:
        assert result["equal after shutdown"]
        assert result["equal after wrapping anew"]


def test_many_wraps_leak_no_descriptors_and_threads(left) -> None:
    for result in left:
        before, after = result["descriptors"]
        assert after <= before
        before, after = result["tasks"]
        assert after <= before + 3  # Go's runtime keeps a few threads more after a busy moment


def test_check_clean_can_fail() -> None:
    with pytest.raises(AssertionError, match="rank 0"):
        check_clean([Outcome(0, 0, None, "INFO autobyte: x\nterminate called\n")])
    with pytest.raises(AssertionError, match=re.escape("(-6, [])")):
        check_clean([Outcome(0, -6, None, "")])
