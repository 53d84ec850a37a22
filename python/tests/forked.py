"""Ranks that start in a moment: forked from a process that has imported torch already.

A forked rank is a process of its own that ends as any script does, through the
interpreter's own exit. Only the imports are shared, so that a test can afford
many starts. AutoByte's library is loaded after the fork, in the rank.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import BinaryIO

from ranks import PYTHON_ROOT, TESTS, Ranks, run_task

_LOOK_EVERY_S = 0.01


class Child:
    """A forked rank, with the part of Popen's interface that Ranks uses."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid

    @property
    def returncode(self) -> int | None:
        return self._nursery.ended.get(self.pid, (None,))[0]

    @property
    def ended_at(self) -> float:
        """When it ended, in seconds since the epoch."""
        return self._nursery.ended[self.pid][1]

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._nursery.changed:
            if not self._nursery.changed.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired("forked rank", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks the ranks, seen from the test."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.started: list[int] = []
        self.ended: dict[int, tuple[int, float]] = {}  # by pid: return code, time
        path = os.pathsep.join([str(PYTHON_ROOT), str(TESTS)])
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._process.stdin.close)

    def _listen(self) -> None:
        for line in self._process.stdout:
            event = json.loads(line)
            with self.changed:
                if "started" in event:
                    self.started.append(event["started"])
                else:
                    self.ended[event["ended"]] = (event["code"], event["at"])
                self.changed.notify_all()

    def fork(self, arguments: list[str], variables: dict[str, str], output: str) -> Child:
        with self.changed:
            count = len(self.started)
            self._process.stdin.write(json.dumps([arguments, variables, output]) + "\n")
            self._process.stdin.flush()
            if not self.changed.wait_for(lambda: len(self.started) > count, 60):
                raise AssertionError("the process that forks the ranks does not answer")
            return Child(self, self.started[-1])


_nursery: Nursery | None = None


class ForkedRanks(Ranks):
    """As Ranks, forked. ``processes`` know when they ended."""

    def _start(self, arguments: list[str], variables: dict[str, str], output: BinaryIO) -> Child:
        global _nursery
        if _nursery is None:
            _nursery = Nursery()
        return _nursery.fork(arguments, variables, output.name)


def _serve() -> bool:
    """Forks a rank for each line of stdin. Returns True in a rank, False when it is all over."""
    children: set[int] = set()
    lines = sys.stdin.buffer.raw
    while True:
        if select.select([lines], [], [], _LOOK_EVERY_S)[0]:
            line = _line(lines)
            if not line:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return False
            pid = os.fork()
            if pid == 0:
                _become_rank(*json.loads(line))
                return True
            children.add(pid)
            print(json.dumps({"started": pid}), flush=True)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                print(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status), "at": time.time()}), flush=True)


def _line(raw) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = raw.read(1)
        if not byte:
            return b""
        line += byte
    return line


def _become_rank(arguments: list[str], variables: dict[str, str], output: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [__file__, *arguments]
    os.environ.clear()
    os.environ.update(variables)
    with open(os.devnull, "rb") as nothing, open(output, "ab") as out:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)


if __name__ == "__main__":
    import torch
    import torch._dynamo  # noqa: F401 - the first optimizer imports it

    import autobyte.torch  # noqa: F401 - imports, and does not load the library

    if _serve():
        run_task()
