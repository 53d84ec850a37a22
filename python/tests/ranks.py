"""Runs a function on several ranks, each a process of its own, and brings back what they return.

The processes are started without torchrun's agent, so that a test can kill one
and hear what the others say.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

TESTS = Path(__file__).resolve().parent
PYTHON_ROOT = TESTS.parent


@dataclass
class Outcome:
    """What became of one rank: its result, or the output of its failure."""

    rank: int
    returncode: int
    result: Any
    output: str  # stdout and stderr together


class Ranks:
    """Processes that run ``function(rank, world, *arguments)`` with torch.distributed's variables set.

    function must be importable: a module-level function of a test module or of
    a module beside it. It is not given an initialized process group; see
    ``init_gloo``.
    """

    def __init__(self, function: Callable, world: int, *arguments: object, env: dict[str, str] | None = None) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="autobyte-test-")
        port = free_port()
        task = Path(self._folder.name, "task")
        task.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        self.processes: list[subprocess.Popen] = []
        self._outputs = [Path(self._folder.name, f"output-{rank}") for rank in range(world)]
        for rank in range(world):
            variables = {
                **os.environ,
                "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(PYTHON_ROOT), str(TESTS)]),
                **(env or {}),
            }  # fmt: skip
            with self._outputs[rank].open("wb") as output:
                self.processes.append(self._start([str(task), str(self._result(rank))], variables, output))

    def _start(self, arguments: list[str], variables: dict[str, str], output: BinaryIO) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-u", __file__, *arguments],
            env=variables, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def _result(self, rank: int) -> Path:
        return Path(self._folder.name, f"result-{rank}")

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        return self._outputs[rank].read_text(errors="replace")

    def wait_for(self, rank: int, text: str, timeout_s: float) -> None:
        """Waits until a rank has printed a text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output(rank):
            if self.processes[rank].poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"rank {rank} did not print {text!r}:\n{self.output(rank)}")
            time.sleep(0.01)

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(signal_number)

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Waits for all ranks; those that outlive the time are killed and have returncode None's stand-in -9."""
        deadline = time.monotonic() + timeout_s
        outcomes = []
        for rank, process in enumerate(self.processes):
            late = ""
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                late = f"\n[killed by the test: still running after {timeout_s} s]"
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
            path = self._result(rank)
            result = pickle.loads(path.read_bytes()) if path.exists() else None
            outcomes.append(Outcome(rank, process.returncode, result, self.output(rank) + late))
        return outcomes

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_ranks(
    function: Callable, world: int, *arguments: object, timeout_s: float = 120, env: dict[str, str] | None = None
) -> list[Any]:
    """Runs the function on all ranks and returns their results; fails if one fails."""
    with Ranks(function, world, *arguments, env=env) as ranks:
        outcomes = ranks.wait(timeout_s)
        for outcome in outcomes:
            if outcome.returncode != 0:
                report = "\n".join(f"--- rank {o.rank}, exit code {o.returncode}\n{o.output}" for o in outcomes)
                raise AssertionError(f"rank {outcome.rank} of {world} failed in {function.__qualname__}:\n{report}")
        return [outcome.result for outcome in outcomes]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def init_gloo(timeout_s: float = 120) -> None:
    """What a training script does first."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def run_task() -> None:
    """What a rank's process does: sys.argv names the task and where its result goes."""
    import importlib
    import logging

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    task, result = sys.argv[1:]
    module, name, arguments = pickle.loads(Path(task).read_bytes())
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    value = function(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *arguments)
    Path(result).write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    run_task()
