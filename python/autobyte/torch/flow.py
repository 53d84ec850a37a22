"""From a gradient to its average: views, passes, waits.

One pass is one backward pass. ``close_pass`` ends it; whatever had no gradient
by then takes part with what it had (zeros, or what was accumulated before),
and the ranks tell each other which tensors had none anywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from autobyte._lib import AutoByteError, Handle
from autobyte.torch.issue import Issuer, ranges_to_events
from autobyte.torch.slots import Slot, State

log = logging.getLogger("autobyte")

#: Seconds after which a wait that goes on is logged, and again each time.
WARN_EVERY_S = 30.0

#: Tensors in forward order that one question to the library covers.
_RUN = 32


def in_backward() -> bool:
    """True inside a backward pass of this thread."""
    return torch._C._current_graph_task_id() != -1


class Patience:
    """Decides, slice by slice, whether a wait on living ranks goes on."""

    def __init__(self, handle: Handle, limit_s: float) -> None:
        self._handle, self._limit_s = handle, limit_s
        self._begin = time.monotonic()
        self._warn_at = WARN_EVERY_S

    def tick(self) -> None:
        """Call after a slice that brought nothing."""
        waited = time.monotonic() - self._begin
        if waited >= self._limit_s:
            raise AutoByteError(
                f"nothing came for {waited:.0f} s, the process group's timeout: {self._handle.waiting_for()}"
            )
        if waited >= self._warn_at:
            log.warning("waiting for %.0f s: %s", waited, self._handle.waiting_for())
            self._warn_at += WARN_EVERY_S


class Flow:
    """The gradients of one model on one rank."""

    def __init__(self, handle: Handle, issuer: Issuer, rank: int, world: int, limit_s: float) -> None:
        self.handle = handle
        self.sync = True  # False inside no_sync()
        self.slots: list[Slot] = []
        self.forward: list[Slot] = []  # in forward order, once the layout is fixed
        self.spaces: list[torch.Tensor] | None = None  # flat buffers; None until the first gradient
        self.settle_update: Callable[[Slot], None] = lambda slot: None  # applies one pending update now
        self.error: BaseException | None = None  # of the issuing thread
        self._issuer, self._rank, self._limit_s = issuer, rank, limit_s
        self._scale = 1.0 / world
        self._order: list[int] = []  # registration indices in the order of first use
        self._in_pass = False
        self._pass_mark = 0
        self._took_part = 0  # slots of the open pass
        self._verdicts: dict[int, list[Slot]] = {}  # pass -> its slots that had no gradient here

    # -- layout

    def set_slots(self, slots: list[Slot]) -> None:
        """Takes the trainable parameters; their places are fixed at the next gradient."""
        self.slots, self.spaces = slots, None
        self._order, self._verdicts = [], {}

    def note_use(self, slots: list[Slot]) -> None:
        """Records the order of first use."""
        for slot in slots:
            if not slot.seen:
                slot.seen = True
                self._order.append(slot.index)

    def _fix_layout(self) -> None:
        kinds: dict[tuple, int] = {}
        tensors = []
        for slot in self.slots:
            p = slot.param
            space = kinds.setdefault((p.dtype, p.device), len(kinds))
            tensors.append(describe(slot.name, p) | {"bytes": p.numel() * p.element_size(), "space": space})
        order = None
        if self._rank == 0:
            used = set(self._order)
            order = self._order + [slot.index for slot in self.slots if slot.index not in used]
        self.handle.set_tensors(tensors, order)
        patience = Patience(self.handle, self._limit_s)
        while (layout := self.handle.layout(len(tensors), len(kinds))) is None:
            patience.tick()
        offsets, forward, sizes = layout
        self.forward = [self.slots[i] for i in forward]
        for position, slot in enumerate(self.forward):
            slot.position = position
        with torch.inference_mode(False), torch.no_grad():
            spaces = [
                torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
                for (dtype, device), size in zip(kinds, sizes, strict=True)
            ]
            for slot, tensor, offset in zip(self.slots, tensors, offsets, strict=True):
                slot.view = _view(spaces[tensor["space"]], slot.param, offset)
        self._issuer.set_spaces(spaces, self._event_finder(tensors, offsets, len(spaces)))
        self.spaces = spaces

    def _event_finder(self, tensors: list[dict], offsets: list[int], spaces: int) -> Callable | None:
        if not self.slots or self.slots[0].param.device.type != "cuda":
            return None
        places = sorted((tensor["space"], offset, i) for i, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)))
        by_space: list[list] = [[] for _ in range(spaces)]
        for space, offset, i in places:
            by_space[space].append((offset, self.slots[i]))
        return ranges_to_events(
            [[offset for offset, _ in row] for row in by_space], [[slot for _, slot in row] for row in by_space]
        )

    # -- a gradient arrives

    def on_gradient(self, slot: Slot) -> None:
        """A backward pass has accumulated into the real ``.grad`` of the slot's parameter."""
        if slot.state is State.PENDING:
            raise AutoByteError(
                f"parameter {slot.name} got a gradient while its update from the last step() was still to be applied: "
                "the forward pass read it past its module. Read it through the module (model.layer.weight) or call "
                "ab.synchronize(model) before the forward pass"
            )
        gradient = slot.raw
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            slot.raw = None  # what can't be averaged must not take part later
            raise AutoByteError(f"parameter {slot.name} has a {gradient.layout} gradient; only dense ones can be averaged (sparse=False)")
        if gradient.requires_grad:
            gradient = gradient.detach()
        if not self.sync:
            self._accumulate_here(slot, gradient)
            return
        if self.spaces is None:
            self._fix_layout()
        if not slot.seen:
            self._note_unseen(slot)
        view = slot.view
        if gradient.dtype != view.dtype or gradient.shape != view.shape or gradient.device != view.device:
            slot.raw = None
            raise AutoByteError(
                f"parameter {slot.name} is {tuple(gradient.shape)} {gradient.dtype} on {gradient.device} and was "
                f"{tuple(view.shape)} {view.dtype} on {view.device} at wrap(): call wrap() after such changes"
            )
        if self._in_pass and slot.pass_mark == self._pass_mark:
            self.close_pass(end_of_step=False)  # a second backward pass before step()
        with torch.no_grad():
            before = self.result(slot) if slot.state is State.FLYING else None
            if before is not None:
                torch.add(before, gradient, out=view)
                view.mul_(self._scale)
            else:
                if slot.busy:
                    self.wait(slot)
                if gradient.data_ptr() == view.data_ptr():
                    view.mul_(self._scale)
                else:
                    torch.mul(gradient, self._scale, out=view)
        self._enter(slot)
        patience = None
        while not self.handle.ready(slot.index):
            patience = patience or Patience(self.handle, self._limit_s)
            patience.tick()

    def _note_unseen(self, slot: Slot) -> None:
        slot.seen = slot.eager = True
        log.warning(
            "parameter %s is used past its module; its update is applied in step(), not at its next use", slot.name
        )

    def _accumulate_here(self, slot: Slot, gradient: torch.Tensor) -> None:
        """no_sync(): gradients add up in the real ``.grad``, on top of what is already averaged."""
        if slot.state is State.FLYING:
            if self._in_pass and slot.pass_mark == self._pass_mark:
                self.close_pass(end_of_step=False)
            before = self.result(slot)
            with torch.no_grad():
                slot.raw = gradient if before is None else torch.add(before, gradient)
            slot.state = State.IDLE

    def _enter(self, slot: Slot) -> None:
        """The slot's view now belongs to the pass that is open, or opens."""
        if not self._in_pass:
            self._in_pass = True
            self._pass_mark += 1
            self._took_part = 0
        slot.raw = None
        slot.kept = None
        slot.state = State.FLYING
        slot.busy = True
        slot.absent_in = 0
        slot.pass_mark = self._pass_mark
        self._took_part += 1
        if slot.view.is_cuda:
            slot.event = torch.cuda.Event()
            slot.event.record(torch.cuda.current_stream(slot.view.device))

    # -- a pass ends

    def close_pass(self, end_of_step: bool) -> None:
        """Ends the open pass, if there is one, and with end_of_step the optimizer's step."""
        absent: list[Slot] = []
        if self._in_pass and self._took_part < len(self.slots):
            absent = [slot for slot in self.slots if slot.pass_mark != self._pass_mark]
            for slot in absent:
                self._take_part_without_gradient(slot)
        self._in_pass = False
        number, count = self.handle.close_pass(end_of_step)
        if count != len(absent):
            raise AutoByteError(f"internal error: {len(absent)} parameters without a gradient, the library counts {count}")
        if absent:
            self._verdicts[number] = absent
            for slot in absent:
                slot.absent_in = number
            self._forget_verdicts()

    def end_pass_for(self, slot: Slot) -> None:
        """Before the user reads or drops a gradient that the open pass has not brought here: another rank may have brought it."""
        if self._in_pass and slot.pass_mark != self._pass_mark:
            self.close_pass(end_of_step=False)

    def _take_part_without_gradient(self, slot: Slot) -> None:
        if slot.state is State.PENDING:
            self.settle_update(slot)
        with torch.no_grad():
            if slot.state is State.FLYING:
                kept = self.result(slot)
            else:
                if slot.busy:
                    self.wait(slot)
                kept = slot.raw
            if kept is None:
                slot.view.zero_()
            else:
                kept = kept.detach().clone() if kept.data_ptr() == slot.view.data_ptr() else kept.detach()
                torch.mul(kept, self._scale, out=slot.view)
        self._enter(slot)
        slot.kept = kept

    @property
    def in_pass(self) -> bool:
        return self._in_pass

    # -- waiting

    def wait(self, slot: Slot) -> None:
        """Returns when the slot's view is reduced and nobody writes to it."""
        if not slot.busy:
            return
        run = self.handle.reduced(slot.index, _RUN)
        if not run:
            patience = Patience(self.handle, self._limit_s)
            while not (run := self.handle.wait(slot.index, _RUN)):
                self.check()
                patience.tick()
        for reduced in self.forward[slot.position : slot.position + run]:
            reduced.busy = False

    def result(self, slot: Slot) -> torch.Tensor | None:
        """The averaged gradient of a slot that is not idle; None if no rank had one."""
        if self._in_pass and slot.pass_mark == self._pass_mark:
            self.close_pass(end_of_step=False)
        self.wait(slot)
        if slot.absent_in:
            self._resolve(slot.absent_in)
        return slot.view if slot.absent_in == 0 else slot.kept

    def _resolve(self, number: int) -> None:
        """Learns which of a pass's slots without a gradient here had none anywhere."""
        absent = self._verdicts.pop(number, None)
        if absent is None:
            return
        patience = Patience(self.handle, self._limit_s)
        while (nowhere := self.handle.absent(number, len(self.slots))) is None:
            self.check()
            patience.tick()
        nowhere = set(nowhere)
        for slot in absent:
            if slot.absent_in == number and slot.index not in nowhere:
                slot.absent_in = 0  # another rank had a gradient: the view holds the average
                slot.kept = None

    def _forget_verdicts(self) -> None:
        """Of passes whose slots have been dropped or reused since, so that nobody will ask."""
        for number, slots in list(self._verdicts.items()):
            if any(slot.absent_in == number for slot in slots):
                continue
            if self.handle.absent(number, len(self.slots), wait_ms=0) is not None:
                del self._verdicts[number]

    def settle(self, slot: Slot) -> None:
        """Puts the averaged gradient of a flying slot where PyTorch keeps it."""
        if slot.state is State.FLYING:
            self.result(slot)
            slot.raw = slot.gradient
            slot.state = State.IDLE
            slot.absent_in, slot.kept = 0, None

    def check(self) -> None:
        """Raises what ended the issuing thread, if anything did."""
        if self.error is not None:
            raise AutoByteError(f"the issuing thread ended: {self.error}") from self.error


def describe(name: str, tensor: torch.Tensor) -> dict:
    """How the ranks compare a tensor."""
    return {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _view(space: torch.Tensor, param: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """The parameter's range of a space, with the parameter's strides where they are dense.

    For autograd it is no view, as a gradient isn't one: it can be detached in place.
    """
    strides = param.stride() if _is_dense(param) else torch.empty(param.shape, device="meta").stride()
    start = offset_bytes // space.element_size()
    return space.new_empty(0).set_(space.untyped_storage(), start, param.shape, strides)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the strides are a permutation of contiguous ones: no overlap, no holes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
