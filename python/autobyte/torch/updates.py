"""From an average to the parameter: what ``step()`` means, and the gates' work."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from autobyte._lib import AutoByteError
from autobyte.torch.flow import Flow
from autobyte.torch.optim import GatedState, make_shadow, plain_step, snapshot_groups, why_not_separable
from autobyte.torch.slots import Slot, State

log = logging.getLogger("autobyte")

#: Parameters that a gate updates together, where the gradients of the next ones are there.
_TOGETHER = 16


class Updates:
    """Applies an optimizer's steps, at the gates where its step is separable."""

    def __init__(self, optimizer: Optimizer, flow: Flow, rank: int) -> None:
        self.optimizer, self.flow = optimizer, flow
        self.pending = 0  # slots whose update waits for their gate
        self.inside = False  # our own code reads .grad and .state now
        self._depth = 0  # of step() calls under way
        self.model_ids: dict[int, str] = {}  # id(parameter) -> name, all of the model
        self._slot_of: dict[int, Slot] = {}
        self._step = plain_step(type(optimizer))
        self._shadow: Optimizer | None = None
        self._eager: list[Slot] = []
        self._handles = []
        reason = why_not_separable(optimizer)
        self.separable = not reason
        if reason and rank == 0:
            log.info(
                "%s keeps the barrier at step(), since %s: communication overlaps with the backward pass only",
                type(optimizer).__name__, reason,
            )  # fmt: skip
        flow.settle_update = lambda slot: self.apply([slot])

    def set_slots(self, slots: list[Slot]) -> None:
        self._slot_of = {id(slot.param): slot for slot in slots}

    # -- wiring

    def install(self) -> None:
        optimizer = self.optimizer
        self._pre_hook = optimizer.register_step_pre_hook(self._before_step)
        post_hook = optimizer.register_step_post_hook(self._after_step)
        optimizer._optimizer_step_post_hooks.move_to_end(post_hook.id, last=False)  # others find us finished
        self._handles = [
            self._pre_hook,
            post_hook,
            optimizer.register_state_dict_pre_hook(lambda *_: self.synchronize()),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(lambda *_: self._gate_state()),
        ]
        original = optimizer.zero_grad
        optimizer.zero_grad = lambda set_to_none=True: self.zero_grad(original, self._own_slots(), set_to_none)
        self._gate_state()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.optimizer.__dict__.pop("zero_grad", None)
        if isinstance(self.optimizer.state, GatedState):
            self.inside = True  # nothing may be applied any more
            self.optimizer.state = self.optimizer.state.plain()

    def _gate_state(self) -> None:
        if not isinstance(self.optimizer.state, GatedState):
            self.optimizer.state = GatedState(self.optimizer.state, self._state_read)

    def _state_read(self) -> None:
        if self.pending and not self.inside:
            self.synchronize()

    def _before_load(self, *_: object) -> None:
        self.synchronize()

    def _own_slots(self) -> list[Slot]:
        slots = (self._slot_of.get(id(p)) for group in self.optimizer.param_groups for p in group["params"])
        return [slot for slot in slots if slot is not None]

    # -- zero_grad

    def zero_grad(self, original: Callable, slots: list[Slot], set_to_none: bool) -> None:
        """zero_grad of the optimizer or the model, which never touches what is in flight."""
        for slot in slots:
            self.flow.end_pass_for(slot)
        was_inside, self.inside = self.inside, True
        try:
            original(set_to_none)
        finally:
            self.inside = was_inside
        for slot in slots:
            if slot.state is State.IDLE:
                continue
            if not set_to_none and slot.absent_in:
                self._settle(slot)  # only then it is known whether there is a gradient to zero
                if slot.raw is not None:
                    slot.raw.zero_()
                continue
            if slot.state is State.FLYING:
                self.flow_release(slot)
            else:
                slot.zeroed = True
            slot.raw = None if set_to_none else torch.zeros_like(slot.param)

    def _settle(self, slot: Slot) -> None:
        """Puts the slot's gradient where PyTorch keeps it, after its update if one is pending."""
        if slot.state is State.PENDING:
            self.apply([slot])
        else:
            self.flow.settle(slot)

    def flow_release(self, slot: Slot) -> None:
        """The user drops or replaces a gradient that flies: its sum goes on and is not used."""
        slot.state = State.IDLE
        slot.absent_in, slot.kept = 0, None

    # -- step

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        self._depth += 1
        if self._depth > 1:
            return  # a step() that calls the step() of its base class, which has hooks of its own
        self.flow.check()
        self.inside = False
        self.synchronize()  # of the last step, what no forward pass has used
        if _closure(args, kwargs) is not None:
            return  # the closure runs backward passes; its reads of .grad wait by themselves
        self._refuse_strangers()
        self._gate_state()  # the user may have put a fresh dictionary there
        self.flow.close_pass(end_of_step=True)
        if self.separable and not _scales_inside(optimizer) and self._is_last_hook():
            self._defer()
        else:
            for slot in self._own_slots():
                self.flow.settle(slot)

    def _is_last_hook(self) -> bool:
        """False if the user has put a hook behind ours, which may change gradients."""
        return next(reversed(self.optimizer._optimizer_step_pre_hooks)) == self._pre_hook.id

    def _defer(self) -> None:
        snapshots = snapshot_groups(self.optimizer)
        self._eager = []
        for group, snapshot in zip(self.optimizer.param_groups, snapshots, strict=True):
            for p in group["params"]:
                slot = self._slot_of.get(id(p))
                if slot is None or slot.state is not State.FLYING:
                    continue
                slot.state = State.PENDING
                slot.snapshot = snapshot
                slot.zeroed = False
                self.pending += 1
                if slot.eager:
                    self._eager.append(slot)
        self._shadow = make_shadow(self.optimizer)
        self.inside = True  # until the real step(), which finds no gradient, is over

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        self.inside = False
        if not self._is_last_hook():
            optimizer._optimizer_step_pre_hooks.move_to_end(self._pre_hook.id)
        if _closure(args, kwargs) is not None:
            self.flow.close_pass(end_of_step=True)
        elif self._eager:
            self.apply(self._eager)

    def outside(self) -> None:
        """The training loop is at work: whatever step() was running is over, by an exception perhaps."""
        self.inside, self._depth = False, 0

    def _refuse_strangers(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in self._slot_of and id(p) not in self.model_ids:
                    raise AutoByteError(
                        f"parameter {i} of the optimizer's group {number}, of shape {tuple(p.shape)}, is not in the wrapped "
                        "model: its gradient would not be averaged. Wrap a model that contains it"
                    )

    # -- the gate

    def synchronize(self) -> None:
        """Applies every update that is pending."""
        if self.pending and not self.inside:
            self.apply(list(self._slot_of.values()))

    def apply(self, slots: list[Slot]) -> None:
        """Waits for the gradients of those slots whose update is pending, and applies it."""
        todo = [slot for slot in slots if slot.state is State.PENDING]
        if not todo:
            return
        for slot in todo:
            self.flow.result(slot)
        self._add_followers(todo)
        was_inside, self.inside = self.inside, True
        try:
            slots = [slot for slot in todo if slot.absent_in == 0 or slot.kept is not None]
            if _is_outside():
                self._step_slice(slots)
            else:
                with _as_outside():
                    self._step_slice(slots)
        finally:
            self.inside = was_inside
        for slot in todo:
            if not slot.zeroed:
                slot.raw = slot.gradient
            slot.state = State.IDLE
            slot.snapshot = None
            slot.absent_in, slot.kept = 0, None
        self.pending -= len(todo)
        if not self.pending:
            self._state_in_order()

    def _state_in_order(self) -> None:
        """Entries that a step has made get the order of the groups, not of the gates."""
        state = self.optimizer.state
        if isinstance(state, GatedState) and state.has_grown():
            state.order_new([p for group in self.optimizer.param_groups for p in group["params"]])

    def _add_followers(self, todo: list[Slot]) -> None:
        """Adds what comes next in forward order and is reduced already: one call of the optimizer costs less than many."""
        forward = self.flow.forward
        position = max(slot.position for slot in todo) + 1  # nothing behind it is in todo
        while len(todo) < _TOGETHER and position < len(forward):
            slot = forward[position]
            if slot.state is not State.PENDING or slot.busy or slot.absent_in:
                return
            todo.append(slot)
            position += 1

    def _step_slice(self, slots: list[Slot]) -> None:
        if not slots:
            return
        groups: dict[int, dict] = {}
        for slot in slots:
            group = groups.get(id(slot.snapshot))
            if group is None:
                group = groups[id(slot.snapshot)] = {**slot.snapshot, "params": []}
            group["params"].append(slot.param)
            slot.applying = True
        shadow = self._shadow
        shadow.param_groups = list(groups.values())
        try:
            self._step(shadow)
        finally:
            for slot in slots:
                slot.applying = False


def gradient_while_applying(slot: Slot) -> torch.Tensor | None:
    """What the optimizer's own reads of ``.grad`` get."""
    return slot.gradient if slot.applying else slot.raw


def _closure(args: tuple, kwargs: dict) -> Callable | None:
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _scales_inside(optimizer: Optimizer) -> bool:
    """True if a GradScaler leaves unscaling to this step() (fused optimizers)."""
    return getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None


def _is_outside() -> bool:
    """True in the modes in which step() runs: gradients enabled, no inference mode, no autocast."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not any(map(_autocasts, _KINDS))
    )


_KINDS = ("cpu", "cuda")


def _autocasts(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except TypeError:  # before PyTorch 2.4
        return torch.is_autocast_cpu_enabled() if kind == "cpu" else torch.is_autocast_enabled()


@contextlib.contextmanager
def _as_outside():
    """The modes in which step() runs: gradients enabled, no inference mode, no autocast."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        for kind in _KINDS:
            if _autocasts(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Refuses an optimizer over parameters that the model does not have. Returns the model's names by id."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"wrap(): the optimizer is a {type(optimizer).__name__}, a torch.optim.Optimizer is needed")
    names = {id(p): name for name, p in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"wrap(): parameter {i} of the optimizer's group {number}, of shape {tuple(p.shape)}, is not in the model. "
                    "Make the optimizer from the parameters of the model that is wrapped, after any .to() or conversion"
                )
    return names
