"""The external engine's hands: one thread issues what the library says, in its order."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

from autobyte._lib import AGAIN, OK, Handle, Op
from autobyte.torch.rendezvous import WORK_SLICE, has_ended


class Issuer:
    """Drains the library's queue into ``torch.distributed`` all-reduces.

    Collectives of one group must be issued in one order on every rank: the
    library decides it, and there is one such thread per model. A second one
    waits for what was issued, in slices of time, so that it can be ended: a
    callback of an operation that ends while the interpreter does would abort
    the process.
    """

    def __init__(self, handle: Handle, group: dist.ProcessGroup, device: torch.device, on_error: Callable) -> None:
        self._handle, self._group, self._device = handle, group, device
        self._on_error = on_error
        self._options = dist.AllreduceOptions()  # a sum
        self._spaces: list[torch.Tensor] = []
        self._slices: dict[tuple[int, int, int], torch.Tensor] = {}
        self._event_of_range: Callable[[int, int, int], list] | None = None
        self._completions = _Completions(handle, on_error)
        self._thread = threading.Thread(target=self._run, name="autobyte-issue", daemon=True)
        self._thread.start()

    def set_spaces(self, spaces: list[torch.Tensor], events: Callable[[int, int, int], list] | None) -> None:
        """The flat buffers that operations name from now on. Nothing may be under way."""
        self._spaces, self._slices = spaces, {}
        self._event_of_range = events

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads to end after ``Handle.stop``, whatever is under way; False if they did not."""
        self._thread.join(timeout_s)
        return self._completions.stop(timeout_s) and not self._thread.is_alive()

    def _run(self) -> None:
        op = Op()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while True:
                code = self._handle.next(op)
                if code == AGAIN:
                    continue
                if code != OK:
                    return
                self._issue(op.step, op.index, op.space, op.offset, op.bytes)
        except BaseException as error:  # noqa: BLE001 - the training thread must hear of it
            self._on_error(error)

    def _issue(self, step: int, index: int, space: int, offset: int, size: int) -> None:
        key = (space, offset, size)
        part = self._slices.get(key)
        if part is None:
            flat = self._spaces[space]
            width = flat.element_size()
            part = self._slices[key] = flat[offset // width : (offset + size) // width]
        try:
            if self._event_of_range is not None:
                for event in self._event_of_range(space, offset, size):
                    torch.cuda.current_stream(self._device).wait_event(event)
            work = self._group.allreduce([part], self._options)
            if self._device.type == "cuda":
                work.wait()  # NCCL: orders this thread's stream after the operation, does not block
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
                self._completions.put(step, index, lambda: _has_passed(event))
            else:
                self._completions.put(step, index, lambda: has_ended(work))
        except Exception as error:  # noqa: BLE001 - whatever torch.distributed says
            self._handle.failed(step, index, _reason(error))


class _Completions:
    """Waits for what was issued and reports it. Operations end in about the order in which they were issued."""

    def __init__(self, handle: Handle, on_error: Callable) -> None:
        self._handle, self._on_error = handle, on_error
        self._queue: SimpleQueue[tuple[int, int, Callable[[], bool]]] = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="autobyte-complete", daemon=True)
        self._thread.start()

    def put(self, step: int, index: int, has_ended: Callable[[], bool]) -> None:
        """has_ended waits for a slice of time, and raises if the operation has failed."""
        self._queue.put((step, index, has_ended))

    def stop(self, timeout_s: float) -> bool:
        self._stopped = True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopped:
                try:
                    step, index, has_ended = self._queue.get(timeout=WORK_SLICE.total_seconds())
                except Empty:
                    continue
                try:
                    while not has_ended():
                        if self._stopped:
                            return
                except Exception as error:  # noqa: BLE001 - whatever torch.distributed says
                    self._handle.failed(step, index, _reason(error))
                else:
                    self._handle.done(step, index)
        except BaseException as error:  # noqa: BLE001 - the training thread must hear of it
            self._on_error(error)


def _has_passed(event: torch.cuda.Event) -> bool:
    event.synchronize()
    return True


def ranges_to_events(starts: list[list[int]], slots: list[list]) -> Callable[[int, int, int], list]:
    """Finds, for a range of a space, the CUDA events of the copies into it.

    starts holds, by space, the offsets in bytes of its slots in ascending order.
    """

    def find(space: int, offset: int, size: int) -> list:
        first = max(bisect_right(starts[space], offset) - 1, 0)
        last = bisect_right(starts[space], offset + size - 1)
        return [slot.event for slot in slots[space][first:last] if slot.event is not None]

    return find


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
