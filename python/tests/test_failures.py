"""What the ranks say, and how they end, when one of them is killed, stopped, fails or strays.

The ranks run without torchrun's agent, which would kill the survivors before
they can speak.
"""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import sys
import time
from dataclasses import dataclass

import pytest
import torch
from forked import ForkedRanks
from ranks import Outcome, init_gloo
from torch import nn

pytestmark = pytest.mark.slow  # as a whole: many starts, and waits for timeouts

STEPS = 6
AT = 3  # the step in which it happens
LIMIT_S = 15  # from the misfortune, or from the timeout after it, to the end of every process


class Net(nn.Module):
    """Its gradients of 1 MB keep the engine busy while the misfortune happens."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.first = nn.Linear(16, 512)
        self.middle = nn.Linear(512, 512)
        self.last = nn.Linear(512, 512)
        self.in_backward = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.middle(torch.tanh(self.first(self.norm(x)))))
        if h.requires_grad:
            h.register_hook(lambda g: self.in_backward())
        return self.last(h)


ACTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": lambda: _raise(ValueError("sample 17 is broken")),
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "sleep": lambda: time.sleep(3600),
}


def _raise(error: BaseException) -> None:
    raise error


def train_and_destroy(*arguments: object) -> None:
    """As train, with the way of ending that torch.distributed advises."""
    try:
        train(*arguments)
    finally:
        torch.distributed.destroy_process_group()
        gc.collect()


def train(rank: int, world: int, victims: tuple[int, ...], phase: str, act: str, options: dict, norm: bool = False) -> None:
    """A training script in which something happens to the victims in step AT."""
    import autobyte.torch as ab

    def happen(now: str) -> None:
        nonlocal phase
        if now == phase and step == AT and rank in victims:
            phase = ""  # once
            print(f"NOW {time.time()}", flush=True)
            ACTS[act]()

    step = -1
    init_gloo()
    torch.manual_seed(1)
    model = Net(norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.middle.register_forward_pre_hook(lambda *_: happen("forward"))
    optimizer.register_step_post_hook(lambda *_: happen("step"))
    model.in_backward = lambda: happen("backward")
    model, optimizer = ab.wrap(model, optimizer, **options)
    print("WRAPPED", flush=True)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            print(f"STEP {step}", flush=True)
        ab.synchronize(model)
    except BaseException:
        print(f"SAID {time.time()}", flush=True)
        raise


@dataclass
class Ending:
    """How one rank ended."""

    outcome: Outcome
    said_s: float  # from the misfortune to its exception; nan without
    ended_s: float  # from the misfortune to the end of the process

    @property
    def code(self) -> int:
        return self.outcome.returncode

    @property
    def error(self) -> str:
        """The last line of its traceback."""
        lines = self.outcome.output.strip().splitlines()
        errors = [line for line in lines if re.match(r"\w*(\.\w+)*(Error|Interrupt)\b", line)]
        return errors[-1] if errors else ""


def run(function, world: int, *arguments: object, limit_s: float = 60, stopped: tuple[int, ...] = (), also=None) -> list[Ending]:
    """Runs the ranks to their ends. Those that were stopped are killed once all others have ended."""
    with ForkedRanks(function, world, *arguments) as ranks:
        if also is not None:
            also(ranks)
        if stopped:
            deadline = time.monotonic() + limit_s
            others = [p for rank, p in enumerate(ranks.processes) if rank not in stopped]
            while any(p.poll() is None for p in others) and time.monotonic() < deadline:
                time.sleep(0.05)
            for rank in stopped:
                ranks.kill(rank)
        outcomes = ranks.wait(limit_s)
        for outcome in outcomes:
            outcome.output = re.sub(r"(?m)^\[rank\d+\]: ", "", outcome.output)
        began = min((float(m[1]) for o in outcomes if (m := re.search(r"^NOW (\S+)", o.output, re.M))), default=math.nan)
        endings = []
        for outcome, process in zip(outcomes, ranks.processes, strict=True):
            said = re.search(r"^SAID (\S+)", outcome.output, re.M)
            ending = Ending(outcome, float(said[1]) - began if said else math.nan, process.ended_at - began)
            print(f"--- rank {outcome.rank}: code {ending.code}, said {ending.said_s:.2f} s, ended {ending.ended_s:.2f} s\n{outcome.output}")
            endings.append(ending)
        return endings


NOISE = ("terminate called", "Fatal Python error", "core dumped", "Exception ignored", "Segmentation", "panic:", "still running")


def check_survivor(ending: Ending, lost: int, limit_s: float = LIMIT_S) -> None:
    """It named the lost rank, the step and tensors, and ended by itself with a traceback."""
    error = ending.error
    assert re.search(rf"rank {lost} is lost \(.+\)", error), error
    step = re.search(r"at step (\d+)", error)
    assert step and int(step[1]) in (AT - 1, AT), error
    assert re.search(r"waiting for it: (\w+\.(weight|bias)|the model's buffers)", error), error
    check_ended_with_traceback(ending, limit_s)


def check_ended_with_traceback(ending: Ending, limit_s: float = LIMIT_S, code: int = 1) -> None:
    assert ending.code == code
    assert ending.ended_s < limit_s
    assert "Traceback (most recent call last)" in ending.outcome.output
    for noise in NOISE:
        assert noise not in ending.outcome.output


@pytest.mark.parametrize(
    ("world", "victim", "phase", "norm"),
    [
        (2, 0, "backward", False), (2, 1, "backward", False), (2, 0, "forward", False), (2, 1, "forward", True),
        (2, 0, "step", True), (2, 1, "step", False), (3, 0, "backward", True), (3, 1, "backward", False),
        (3, 2, "forward", False), (3, 0, "forward", True), (3, 0, "step", False),
    ],
)  # fmt: skip
def test_a_killed_rank_is_named_by_all_others(world: int, victim: int, phase: str, norm: bool) -> None:
    """Killed in mid-step; norm adds the buffers' broadcast to what the others may wait in."""
    endings = run(train, world, (victim,), phase, "kill", {}, norm)
    assert endings[victim].code == -signal.SIGKILL
    for ending in endings:
        if ending.outcome.rank != victim:
            check_survivor(ending, victim)


@pytest.mark.parametrize(
    ("world", "victim", "phase", "norm"),
    [(2, 0, "backward", False), (2, 1, "forward", False), (2, 0, "forward", True), (3, 0, "step", False), (3, 2, "backward", False)],
)
def test_a_stopped_rank_is_named_within_the_timeout(world: int, victim: int, phase: str, norm: bool) -> None:
    timeout_s = 3
    endings = run(train, world, (victim,), phase, "stop", {"timeout": timeout_s}, norm, stopped=(victim,))
    for ending in endings:
        if ending.outcome.rank != victim:
            check_survivor(ending, victim)
            assert timeout_s - 1.1 < ending.said_s < timeout_s + 4


@pytest.mark.parametrize(("world", "victim", "act"), [(2, 0, "stop"), (3, 2, "stop"), (3, 1, "raise"), (3, 0, "kill")])
def test_destroy_process_group_after_a_failure_does_not_hang(world: int, victim: int, act: str) -> None:
    """Though operations are under way that never end."""
    stopped = (victim,) if act == "stop" else ()
    endings = run(train_and_destroy, world, (victim,), "backward", act, {"timeout": 3}, stopped=stopped)
    for ending in endings:
        if ending.outcome.rank != victim:
            check_survivor(ending, victim)


@pytest.mark.parametrize(("world", "victim", "phase"), [(2, 0, "backward"), (2, 1, "forward"), (3, 1, "step"), (3, 0, "backward")])
def test_an_exception_reaches_the_others_with_its_reason(world: int, victim: int, phase: str) -> None:
    endings = run(train, world, (victim,), phase, "raise", {})
    check_ended_with_traceback(endings[victim])
    assert endings[victim].error == "ValueError: sample 17 is broken"
    for ending in endings:
        if ending.outcome.rank != victim:
            check_survivor(ending, victim)
            assert "ValueError: sample 17 is broken" in ending.error


@pytest.mark.parametrize(("victim", "phase"), [(0, "backward"), (1, "backward"), (1, "forward"), (0, "step")])
def test_ctrl_c_on_one_rank(victim: int, phase: str) -> None:
    endings = run(train, 2, (victim,), phase, "interrupt", {})
    check_ended_with_traceback(endings[victim], code=-signal.SIGINT)
    assert endings[victim].error == "KeyboardInterrupt"
    check_survivor(endings[1 - victim], victim)
    assert "KeyboardInterrupt" in endings[1 - victim].error


@pytest.mark.parametrize(("victim", "phase", "norm"), [(0, "forward", False), (1, "forward", False), (0, "forward", True), (1, "backward", False)])
def test_ctrl_c_on_all_ranks_while_they_wait(victim: int, phase: str, norm: bool) -> None:
    """The victim sleeps, so that the other one waits for it."""

    def interrupt(ranks: ForkedRanks) -> None:
        ranks.wait_for(victim, "NOW", 30)
        time.sleep(0.5)
        for rank in range(2):
            ranks.kill(rank, signal.SIGINT)

    for ending in run(train, 2, (victim,), phase, "sleep", {}, norm, also=interrupt):
        check_ended_with_traceback(ending, code=-signal.SIGINT)
        assert ending.error == "KeyboardInterrupt"


@pytest.mark.parametrize(("world", "victim", "phase"), [(2, 0, "backward"), (2, 1, "forward"), (3, 1, "step")])
def test_sys_exit_in_training(world: int, victim: int, phase: str) -> None:
    endings = run(train, world, (victim,), phase, "exit", {})
    assert endings[victim].code == 3
    for ending in endings:
        if ending.outcome.rank != victim:
            assert re.search(rf"rank {victim} (is lost|has left the job)", ending.error)
            check_ended_with_traceback(ending)


def stray(rank: int, world: int, victim: int, how: str, options: dict) -> None:
    """A training script in which the victim's loop differs from the others'."""
    import autobyte.torch as ab

    init_gloo()
    model = Net(norm=how == "fewer steps, norm")
    if rank == victim and how == "another shape":
        model.last = nn.Linear(512, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print(f"NOW {time.time()}", flush=True)
    try:
        if rank == victim and how == "no wrap":
            time.sleep(options["timeout"] + 6)
            return
        ab.wrap(model, optimizer, **options)
        for step in range(STEPS):
            if rank == victim and step == AT and how.startswith("fewer steps"):
                if "alive" in how:
                    ab.shutdown()
                    time.sleep(10)
                return
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            if rank == victim and step == (STEPS - 1 if how == "one more at the end" else AT) and how.startswith("one more"):
                model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        ab.synchronize(model)
        ab.shutdown()
    except BaseException:
        print(f"SAID {time.time()}", flush=True)
        raise


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["fewer steps", "fewer steps, norm", "fewer steps, alive"])
def test_a_rank_that_runs_fewer_steps_is_named(victim: int, how: str) -> None:
    endings = run(stray, 3, victim, how, {})
    assert endings[victim].code == 0
    for ending in endings:
        if ending.outcome.rank != victim:
            check_ended_with_traceback(ending)
            assert f"rank {victim} has left the job" in ending.error


@pytest.mark.parametrize("victim", [0, 1])
def test_another_number_of_backward_passes_is_an_error_everywhere(victim: int) -> None:
    """And not a sum of gradients of different steps."""
    for ending in run(stray, 2, victim, "one more", {}):
        check_ended_with_traceback(ending)
        assert "the ranks don't run the same backward passes" in ending.error


@pytest.mark.parametrize("victim", [0, 1])
def test_a_backward_pass_too_many_at_the_end_is_an_error_where_it_ran(victim: int) -> None:
    endings = run(stray, 2, victim, "one more at the end", {})
    assert endings[1 - victim].code == 0
    check_ended_with_traceback(endings[victim])
    assert f"rank {1 - victim} has left the job" in endings[victim].error


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_never_wraps_is_named(victim: int) -> None:
    endings = run(stray, 3, victim, "no wrap", {"timeout": 3})
    for ending in endings:
        if ending.outcome.rank != victim:
            check_ended_with_traceback(ending)
            assert f"rank {victim}" in ending.error
            assert ending.said_s < 7


def test_models_that_differ_end_wrap_everywhere() -> None:
    for ending in run(stray, 3, 2, "another shape", {}):
        check_ended_with_traceback(ending)
        assert "rank 2 and rank 0 don't have the same" in ending.error
        assert "last.weight" in ending.error
        assert ending.said_s < 10
