"""One wrapped model: wires gradients, gates, optimizer, buffers and the library together."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from autobyte._lib import AutoByteError, Handle
from autobyte.config import Options
from autobyte.torch import slots as slot_registry
from autobyte.torch.flow import Flow, Patience, describe, in_backward
from autobyte.torch.gates import Gates, Hook, put_method, take_method
from autobyte.torch.issue import Issuer
from autobyte.torch.plain import Alone
from autobyte.torch.rendezvous import Broadcaster, Meeting
from autobyte.torch.slots import Slot, State
from autobyte.torch.updates import Updates, check_optimizer, gradient_while_applying

log = logging.getLogger("autobyte")

#: What wrap() made of models and is not shut down: a Session, or what plain.py has instead.
sessions: weakref.WeakKeyDictionary[nn.Module, Session | Alone] = weakref.WeakKeyDictionary()

#: Seconds in which the issuing threads end.
_END_S = 3.0


class Session:
    """What wrap() makes of a model and its optimizer on one rank."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: Options, base: dist.ProcessGroup) -> None:
        names = check_optimizer(model, optimizer)
        device = _one_device(model)
        self.model, self.optimizer, self.base = model, optimizer, base
        self._pid = os.getpid()
        self._closed = False
        self._buffers_due = True  # as DDP: before the first forward pass, and after each one that trains
        self._handles: list = []
        self._param_handles: list = []
        self._gates: Gates | None = None
        self._meeting = meeting = Meeting(base, device)
        self.rank, self.world = meeting.rank, meeting.world
        limit_s = _group_timeout_s(base, device)
        self.handle = Handle(
            {
                "rank": meeting.rank, "world": meeting.world, "job": meeting.job, "incarnation": meeting.incarnation,
                "timeout_s": options.timeout, "port": options.port, "interface": options.interface,
                "settings": options.settings(), "tensors": _identity(model),
                "log": os.environ.get("AUTOBYTE_DEBUG", "") not in ("", "0"),
            }
        )  # fmt: skip
        try:
            meeting.connect(self.handle, options.timeout)
            self._report_settings(options)
            partitions = meeting.new_group()
            self._broadcaster = Broadcaster(meeting.new_group(), meeting.source, self.handle.check)
            self._broadcaster.send([*model.parameters(), *model.buffers()], "the model's parameters and buffers")
        except BaseException as error:
            with contextlib.suppress(AutoByteError):
                self.handle.shutdown(f"its wrap() failed: {type(error).__name__}: {error}")
            meeting.abandon()
            raise
        self.issuer = Issuer(self.handle, partitions, device, self._issuing_failed)
        self.flow = Flow(self.handle, self.issuer, self.rank, self.world, limit_s)
        self.updates = Updates(optimizer, self.flow, self.rank)
        self.updates.model_ids = names
        self._limit_s = limit_s
        self._all_parameters: list[nn.Parameter] = []
        self._set_parameters()
        self.updates.install()
        self._install()

    # -- wiring

    def _set_parameters(self) -> None:
        """Makes slots and gates for what is trainable now."""
        self._all_parameters = list(self.model.parameters())
        # An empty gradient equals its average: such a parameter stays as PyTorch handles it.
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad and p.numel() > 0]
        slots = [Slot(self, i, name, p) for i, (name, p) in enumerate(named)]
        for slot in slots:
            slot_registry.register(slot)
            hook = Hook(lambda _, slot=slot: self._on_gradient(slot))
            self._param_handles.append(slot.param.register_post_accumulate_grad_hook(hook))
        self._trainable = [p.requires_grad for p in self._all_parameters]
        self.flow.set_slots(slots)
        self.updates.set_slots(slots)
        self._gates = Gates(self, self.model, {id(slot.param): slot for slot in slots})

    def _drop_parameters(self) -> None:
        for handle in self._param_handles:
            handle.remove()
        self._param_handles = []
        for slot in self.flow.slots:
            slot_registry.unregister(slot)
        if self._gates is not None:
            self._gates.remove()
            self._gates = None

    def _install(self) -> None:
        model = self.model
        self._handles.append(model.register_forward_pre_hook(Hook(self._before_forward), prepend=True))
        self._handles.append(model.register_forward_hook(Hook(self._after_forward)))
        original = model.zero_grad
        put_method(model, "zero_grad", lambda set_to_none=True: self._zero_grad(original, set_to_none))
        put_method(model, "no_sync", self.no_sync)

    def _zero_grad(self, original, set_to_none: bool) -> None:
        self.updates.zero_grad(original, self.flow.slots, set_to_none)

    # -- hooks

    def _on_gradient(self, slot: Slot) -> None:
        if self._closed:
            return
        self._check_process()
        self.updates.outside()
        self.flow.check()
        self.flow.on_gradient(slot)

    def _before_forward(self, module: nn.Module, arguments: object) -> None:
        if self._closed:
            return
        self._check_process()
        self.updates.outside()
        if torch.is_grad_enabled() and not in_backward():
            if [p.requires_grad for p in self._all_parameters] != self._trainable:
                self._change_parameters()
        if self._buffers_due:
            self._sync_buffers()

    def _after_forward(self, module: nn.Module, arguments: object, output: object) -> None:
        self._buffers_due = torch.is_grad_enabled() and self.flow.sync

    def _sync_buffers(self) -> None:
        buffers = list(self.model.buffers())
        if buffers:
            self._broadcaster.send(buffers, "the model's buffers")

    def _change_parameters(self) -> None:
        """Something was frozen, unfrozen or added since the last forward pass: a new layout."""
        self.synchronize()
        self.flow.close_pass(end_of_step=False)
        for slot in self.flow.slots:
            self.flow.settle(slot)
        self._drain()
        self._drop_parameters()
        self._set_parameters()
        if self.rank == 0:
            log.info("the trainable parameters have changed: %d tensors are averaged now", len(self.flow.slots))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise AutoByteError(
                "this process was forked from the one that called wrap(): it has no thread that averages gradients. "
                "Train in the parent, or start the child with spawn and wrap the model there"
            )

    def _issuing_failed(self, error: BaseException) -> None:
        self.flow.error = self.flow.error or error

    # -- what slots and gates ask

    @property
    def pending(self) -> int:
        return self.updates.pending

    @property
    def in_pass(self) -> bool:
        return self.flow.in_pass

    @property
    def inside(self) -> bool:
        return self.updates.inside

    @torch.compiler.disable
    def apply(self, slots: list[Slot]) -> None:
        self.updates.apply(slots)

    def note_use(self, slots: list[Slot]) -> None:
        self.flow.note_use(slots)

    def read_grad(self, slot: Slot) -> torch.Tensor | None:
        """``parameter.grad``: the averaged gradient, waited for if need be."""
        if self.updates.inside:
            return gradient_while_applying(slot)
        if not in_backward():
            self.flow.end_pass_for(slot)
        elif slot.state is not State.IDLE:
            raise AutoByteError(
                f"the gradient of {slot.name} was read in the middle of a backward pass, while it is being averaged: "
                "read it after backward()"
            )
        if slot.state is State.IDLE:
            return slot.raw
        if slot.state is State.FLYING:
            self.flow.settle(slot)
            return slot.raw
        if not slot.zeroed:
            self.updates.apply([slot])  # whoever has the gradient may change it in place
        return slot.raw

    def release_grad(self, slot: Slot) -> None:
        """``parameter.grad = ...``: what flies is no longer this parameter's gradient."""
        if self.updates.inside:
            return
        if not in_backward():
            self.flow.end_pass_for(slot)
        elif slot.state is not State.IDLE:
            raise AutoByteError(f"the gradient of {slot.name} was replaced in the middle of a backward pass, while it is being averaged")
        if slot.state is State.FLYING:
            self.updates.flow_release(slot)
        elif slot.state is State.PENDING:
            slot.zeroed = True

    # -- for the user

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients on this rank, as DDP's no_sync()."""
        before, self.flow.sync = self.flow.sync, False
        try:
            yield
        finally:
            self.flow.sync = before

    def synchronize(self) -> None:
        """Applies all pending updates, waiting for their gradients."""
        self.updates.synchronize()

    def configure(self, settings: dict, first_pass: int) -> None:
        self.handle.configure(settings, first_pass)

    def stats(self) -> dict:
        stats = self.handle.stats()
        stats["separable_optimizer"] = self.updates.separable
        stats["trainable_tensors"] = len(self.flow.slots)
        stats["pending_updates"] = self.updates.pending
        return stats

    def _report_settings(self, options: Options) -> None:
        in_force = self.handle.settings()
        for name, own in options.settings().items():
            if in_force.get(name) != own:
                log.warning("%s=%s was given on rank %d; rank 0's %s is used", name, own, self.rank, in_force.get(name))
        if self.rank == 0:
            log.info(
                "AutoByte averages %d parameters over %d ranks: %s",
                sum(1 for p in self.model.parameters() if p.requires_grad), self.world, _pretty(in_force),
            )  # fmt: skip

    def _drain(self) -> None:
        patience = Patience(self.handle, self._limit_s)
        while not self.handle.drain():
            self.flow.check()
            patience.tick()

    # -- the end

    def shutdown(self, reason: str = "") -> None:
        """Leaves the model plain. With a reason, nothing is waited for and the others are told."""
        if self._closed:
            return
        if os.getpid() != self._pid:
            self._closed = True
            return
        failure = None
        if not reason and self.flow.in_pass:
            reason = _told_by(sys.exc_info()[1])  # in a finally: what came of the pass is no gradient
        if not reason:
            try:
                self.flow.close_pass(end_of_step=False)
                self.synchronize()
                for slot in self.flow.slots:
                    self.flow.settle(slot)
                self._drain()
            except Exception as error:  # a lost peer, usually
                failure, reason = error, str(error)
            except BaseException:
                self._end("interrupted")
                raise
        self._end(reason)
        if failure is not None:
            raise failure

    def _end(self, reason: str) -> None:
        self._closed = True
        with contextlib.suppress(AutoByteError):
            self.handle.stop()
        self.updates.inside = True
        self.updates.remove()
        self._drop_parameters()
        for handle in self._handles:
            handle.remove()
        take_method(self.model, "zero_grad")
        take_method(self.model, "no_sync")
        self.model.__dict__["no_sync"] = contextlib.nullcontext
        ended = self.issuer.join(_END_S)
        with contextlib.suppress(AutoByteError):
            self.handle.shutdown(reason)
        if ended and not reason:
            self._meeting.close()
        else:
            self._meeting.abandon()


def session_of(model: nn.Module) -> Session | Alone:
    session = sessions.get(model) if isinstance(model, nn.Module) else None
    if session is None:
        raise ValueError("this model is not wrapped: call wrap(model, optimizer) first, and pass the model it returned")
    return session


def shutdown_one(model: nn.Module, reason: str = "") -> None:
    """Shuts down what wrap() made of a model."""
    sessions.pop(model).shutdown(reason)


def shutdown_all(group: dist.ProcessGroup | None = None, reason: str = "") -> None:
    """Shuts down every session, or those on a process group; the first error is raised at the end."""
    first = None
    for model, session in list(sessions.items()):
        if group is None or session.base == group:
            try:
                shutdown_one(model, reason)
            except Exception as error:
                first = first or error
    if first is not None:
        raise first


def _told_by(error: BaseException | None) -> str:
    """What the other ranks are told when an error ends this one; "" without an error."""
    return f"its training stopped: {type(error).__name__}: {error}" if error is not None else ""


def _at_exit() -> None:
    """Ends what the script left open; waits for the last step only if the script ended well."""
    crashed = getattr(sys, "last_value", None)
    for model, session in list(sessions.items()):
        reason = _told_by(crashed)
        if not reason and session.in_pass:
            reason = "it ended between a backward pass and step()"
        try:
            shutdown_one(model, reason)
        except BaseException as error:  # noqa: BLE001 - the interpreter is on its way out
            log.error("at exit: %s", error)


_installed = False


def install_process_hooks() -> None:
    """Ends sessions at interpreter exit and before their process group is destroyed."""
    global _installed
    if _installed:
        return
    _installed = True
    atexit.register(_at_exit)
    original = dist.destroy_process_group

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        whole = group is None or group == dist.GroupMember.WORLD
        try:
            shutdown_all(None if whole else group)
        finally:
            original(group)

    destroy_process_group.__doc__ = original.__doc__
    dist.destroy_process_group = destroy_process_group
    dist.distributed_c10d.destroy_process_group = destroy_process_group


def _one_device(model: nn.Module) -> torch.device:
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise ValueError(f"wrap(): parameter {name} has no shape yet: run a forward pass of the model before wrap()")
    devices = {p.device for p in model.parameters() if p.requires_grad and p.numel() > 0}
    if not devices:
        raise ValueError("wrap(): the model has no parameter that requires a gradient; call wrap() when at least one is trainable")
    kinds = {device.type for device in devices}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"wrap(): the trainable parameters are on {found}; they must all be on the CPU or all on CUDA devices")
    return min(devices, key=str)


def _identity(model: nn.Module) -> list[dict]:
    """What all ranks must have alike: parameters, frozen ones too, and buffers."""
    out = []
    for name, p in model.named_parameters():
        entry = describe(name, p) | {"bytes": p.numel() * p.element_size() if p.requires_grad else 0, "space": 0}
        if not p.requires_grad:
            entry["dtype"] += " (frozen)"
        out.append(entry)
    for name, buffer in model.named_buffers():
        entry = describe(name, buffer) | {"bytes": 0, "space": 0}
        entry["dtype"] += " (buffer)"
        out.append(entry)
    return out


def _group_timeout_s(base: dist.ProcessGroup, device: torch.device) -> float:
    try:
        return base._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return 1800.0


def _pretty(settings: dict) -> str:
    return ", ".join(f"{name} {value} B" if name in ("partition", "credit", "fusion") else f"{name} {value}" for name, value in settings.items())
