"""The external engine's hands: one thread issues what the library says, in its order."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable

import torch
import torch.distributed as dist

from autobyte._lib import AGAIN, OK, AutoByteError, Handle, Op


class Issuer:
    """Drains the library's queue into ``torch.distributed`` all-reduces.

    Collectives of one group must be issued in one order on every rank: the
    library decides it, and there is one such thread per model. gloo's and
    MPI's futures complete when the partition is reduced; NCCL's when it is
    enqueued, so there a second thread waits for CUDA events.
    """

    def __init__(self, handle: Handle, group: dist.ProcessGroup, device: torch.device, on_error: Callable) -> None:
        self._handle, self._group, self._device = handle, group, device
        self._on_error = on_error
        self._options = dist.AllreduceOptions()  # a sum
        self._spaces: list[torch.Tensor] = []
        self._slices: dict[tuple[int, int, int], torch.Tensor] = {}
        self._event_of_range: Callable[[int, int, int], list] | None = None
        self._waiter = _EventWaiter(handle, on_error) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="autobyte-issue", daemon=True)
        self._thread.start()

    def set_spaces(self, spaces: list[torch.Tensor], events: Callable[[int, int, int], list] | None) -> None:
        """The flat buffers that operations name from now on. Nothing may be under way."""
        self._spaces, self._slices = spaces, {}
        self._event_of_range = events

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end after ``Handle.stop``; False if it did not."""
        self._thread.join(timeout_s)
        if self._waiter is not None:
            self._waiter.stop(timeout_s)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

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
            if self._waiter is not None:
                work.wait()  # NCCL: orders this thread's stream after the operation, does not block
                done = torch.cuda.Event()
                done.record(torch.cuda.current_stream(self._device))
                self._waiter.put(step, index, done)
            else:
                work.get_future().add_done_callback(lambda future: self._answer(step, index, future))
        except Exception as error:  # noqa: BLE001 - whatever torch.distributed says
            self._handle.failed(step, index, _reason(error))

    def _answer(self, step: int, index: int, future: torch.futures.Future) -> None:
        """Runs in the engine's thread when an operation has ended."""
        try:
            try:
                future.value()
            except Exception as error:  # noqa: BLE001
                self._handle.failed(step, index, _reason(error))
            else:
                self._handle.done(step, index)
        except AutoByteError as error:
            self._on_error(error)


class _EventWaiter:
    """Waits for CUDA events in their order and reports their partitions."""

    def __init__(self, handle: Handle, on_error: Callable) -> None:
        self._handle, self._on_error = handle, on_error
        self._ready = threading.Condition()
        self._queue: list[tuple[int, int, torch.cuda.Event]] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="autobyte-events", daemon=True)
        self._thread.start()

    def put(self, step: int, index: int, event: torch.cuda.Event) -> None:
        with self._ready:
            self._queue.append((step, index, event))
            self._ready.notify()

    def stop(self, timeout_s: float) -> None:
        with self._ready:
            self._stopped = True
            self._ready.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while True:
                with self._ready:
                    while not self._queue and not self._stopped:
                        self._ready.wait(0.1)
                    if not self._queue:
                        return
                    step, index, event = self._queue.pop(0)
                event.synchronize()
                self._handle.done(step, index)
        except BaseException as error:  # noqa: BLE001
            self._on_error(error)


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
