"""A slot per parameter: where its gradient is, and ``Parameter.grad`` as the user sees it.

A gradient in flight must not be zeroed, accumulated into or read half-reduced.
So while it flies the real ``.grad`` is None, and ``Parameter.grad`` is a
property, present while some model is wrapped, that waits and gives the view.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autobyte.torch.session import Session

#: The descriptor of the real ``.grad``.
RAW_GRAD = torch.Tensor.grad


class State(Enum):
    """Where a parameter's gradient is."""

    IDLE = 0  # where PyTorch keeps it: in the real .grad, or nowhere
    FLYING = 1  # in the view, being reduced or already reduced; the real .grad is None
    PENDING = 2  # as FLYING, and step() was called: the gate applies the update


class Slot:
    """One trainable parameter."""

    __slots__ = (
        "absent_in", "applying", "busy", "eager", "event", "index", "kept", "name",
        "param", "pass_mark", "position", "seen", "session", "snapshot", "state", "view", "zeroed",
    )  # fmt: skip

    def __init__(self, session: Session, index: int, name: str, param: torch.nn.Parameter) -> None:
        self.session = session
        self.index = index  # registration index: its number for the library
        self.name = name
        self.param = param
        self.view: torch.Tensor | None = None  # its range of the space, in the parameter's shape and strides
        self.position = 0  # in forward order
        self.state = State.IDLE
        self.busy = False  # the view was handed out and is not known to be reduced
        self.pass_mark = 0  # local number of the last pass this slot took part in
        self.absent_in = 0  # pass in which it had no gradient here and the verdict is not known
        self.kept: torch.Tensor | None = None  # real .grad of a slot that had no gradient in the pass
        self.snapshot: dict | None = None  # hyper-parameters in force at step()
        self.zeroed = False  # zero_grad() came after step(): the user sees no gradient any more
        self.applying = False  # the gate's optimizer reads the view now
        self.seen = False  # was read through its module at least once
        self.eager = False  # is read past its module: its update can't wait for a gate
        self.event = None  # CUDA: the copy into the view

    @property
    def raw(self) -> torch.Tensor | None:
        return RAW_GRAD.__get__(self.param)

    @raw.setter
    def raw(self, value: torch.Tensor | None) -> None:
        RAW_GRAD.__set__(self.param, value)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The averaged gradient of a slot whose result is known.

        Each time another tensor over the same memory: PyTorch's own
        ``Module.to`` and users assign to ``grad.data``, which must not turn
        the view away from its space.
        """
        return self.view.data if self.absent_in == 0 else self.kept


_slots: dict[int, Slot] = {}  # id(parameter) -> slot; a slot keeps its parameter alive


def _get(param: torch.nn.Parameter) -> torch.Tensor | None:
    slot = _slots.get(id(param))
    if slot is None:
        return RAW_GRAD.__get__(param)
    return slot.session.read_grad(slot)


def _set(param: torch.nn.Parameter, value: torch.Tensor | None) -> None:
    slot = _slots.get(id(param))
    if slot is not None:
        slot.session.release_grad(slot)
    RAW_GRAD.__set__(param, value)


def _delete(param: torch.nn.Parameter) -> None:
    _set(param, None)


_property = property(_get, _set, _delete, "The gradient; AutoByte's property waits until it is averaged.")


def register(slot: Slot) -> None:
    """Makes ``.grad`` of the slot's parameter go through its session."""
    if id(slot.param) in _slots:
        raise ValueError(f"parameter {slot.name} belongs to another wrapped model already")
    _slots[id(slot.param)] = slot
    torch.nn.Parameter.grad = _property


def unregister(slot: Slot) -> None:
    """Undoes register; with the last slot the property goes too."""
    if _slots.get(id(slot.param)) is slot:
        del _slots[id(slot.param)]
    if not _slots and "grad" in torch.nn.Parameter.__dict__:
        del torch.nn.Parameter.grad


def is_registered(param: torch.nn.Parameter) -> bool:
    return id(param) in _slots
