"""Gates: the first read of a parameter after ``step()`` applies its update.

A forward pre-hook groups the parameters of one module; a subclass of the
``_parameters`` dictionary catches every other read through a module
(``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``;
an average of weights iterates over ``parameters()``).
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from autobyte.torch.session import Session
    from autobyte.torch.slots import Slot


def _nothing(*_: object, **__: object) -> None:
    """What a hook of ours becomes in a copy of the model."""


class Hook:
    """A hook that a copy or a pickle of the model does not take along, and that torch.compile does not look into."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    @torch.compiler.disable
    def __call__(self, *args: object, **kwargs: object) -> None:
        self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callable:
        return _nothing

    def __reduce__(self) -> tuple:
        return _named, ("_nothing",)


def _named(name: str) -> Callable:
    return globals()[name]


class Gate:
    """The parameters that one module owns."""

    def __init__(self, session: Session, slots: list[Slot], in_compiled: bool = False) -> None:
        self.session = session
        self.slots = slots
        self._in_compiled = in_compiled  # the module lies in a compiled region, whose entry is gated
        self._unseen = True

    def used(self) -> None:
        """The module reads its parameters: notes their order of first use, then opens the gate."""
        session = self.session
        if self._unseen:
            self._unseen = False
            session.note_use(self.slots)
        if session.pending and not session.inside:
            session.apply(self.slots)

    def touched(self) -> None:
        """Something other than a forward pass reads the parameters."""
        session = self.session
        if session.pending and not session.inside:
            session.apply(self.slots)

    def one_used(self, param: object) -> None:
        """One parameter is read by name."""
        if self._in_compiled and torch.compiler.is_compiling():
            return
        if self._unseen:
            self.session.note_use([slot for slot in self.slots if slot.param is param])
        if self.session.pending and not self.session.inside:
            self.session.apply(self.slots)


class GatedParameters(dict):
    """A module's ``_parameters``: every way to a value opens the gate first."""

    __slots__ = ("gate",)

    def __init__(self, values: dict, gate: Gate) -> None:
        super().__init__(values)
        self.gate = gate

    def __getitem__(self, key: str) -> nn.Parameter | None:
        value = dict.__getitem__(self, key)
        self.gate.one_used(value)
        return value

    def get(self, key: str, default: object = None) -> object:
        return self[key] if key in self else default

    def __iter__(self) -> Iterator:
        # Overridden so that dict(self) and {**self} go through here too.
        self.gate.touched()
        return dict.__iter__(self)

    def keys(self):
        self.gate.touched()
        return dict.keys(self)

    def values(self):
        self.gate.touched()
        return dict.values(self)

    def items(self):
        self.gate.touched()
        return dict.items(self)

    def pop(self, *args: object) -> object:
        self.gate.touched()
        return dict.pop(self, *args)

    def copy(self) -> dict:
        return dict(self.items())

    def __or__(self, other: dict) -> dict:
        return self.copy() | other

    def __deepcopy__(self, memo: dict) -> dict:
        return copy.deepcopy(self.copy(), memo)

    def __copy__(self) -> dict:
        return self.copy()

    def __reduce__(self) -> tuple:
        return dict, (self.copy(),)

    __reduce_ex__ = lambda self, protocol: self.__reduce__()  # noqa: E731


class Method:
    """A method that wrap() puts on a model. A copy of the model gets its own class's method back."""

    def __init__(self, owner: nn.Module, name: str, call: Callable) -> None:
        self._owner, self._name, self._call = owner, name, call

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callable:
        return _plain_method(memo.get(id(self._owner), self._owner), self._name)

    def __reduce__(self) -> tuple:
        return _plain_method, (self._owner, self._name)


def _plain_method(owner: nn.Module, name: str) -> Callable:
    method = getattr(type(owner), name, None)
    if method is None:
        return contextlib.nullcontext  # no_sync, where there is nothing to synchronize
    return types.MethodType(method, owner)


class CompiledCall:
    """The call of a module that ``module.compile()`` has compiled, with a gate before it."""

    def __init__(self, module: nn.Module, gate: Gate) -> None:
        self.original, self._gate = module._compiled_call_impl, gate

    def __call__(self, *args: object, **kwargs: object) -> object:
        self._gate.used()
        return self.original(*args, **kwargs)


class Gates:
    """All gates of one model, and how to take them off again.

    What is compiled has one gate, at the entry of the compiled region: hooks
    inside it would cut the region into pieces.
    """

    def __init__(self, session: Session, model: nn.Module, slot_of: dict[int, Slot]) -> None:
        self._modules: list[nn.Module] = []
        self._handles = []
        self._compiled: list[nn.Module] = []
        root_of = {module: root for root in _compiled_roots(model) for module in root.modules()}
        slots_in: dict[nn.Module, list[Slot]] = {}
        for module in model.modules():
            own = [slot_of[id(p)] for p in dict.values(module._parameters) if p is not None and id(p) in slot_of]
            if not own:
                continue
            gate = Gate(session, own, in_compiled=module in root_of)
            module.__dict__["_parameters"] = GatedParameters(module._parameters, gate)
            self._modules.append(module)
            if module in root_of:
                slots_in.setdefault(root_of[module], []).extend(own)
            else:
                self._put_hook(module, gate)
        for root, slots in slots_in.items():
            gate = Gate(session, list(dict.fromkeys(slots)))
            if isinstance(root, torch._dynamo.OptimizedModule):
                self._put_hook(root, gate)  # its own hooks run before the compiled region
            else:
                root._compiled_call_impl = CompiledCall(root, gate)
                self._compiled.append(root)

    def _put_hook(self, module: nn.Module, gate: Gate) -> None:
        hook = Hook(lambda *_: gate.used())
        self._handles.append(module.register_forward_pre_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            parameters = module.__dict__["_parameters"]
            if isinstance(parameters, GatedParameters):
                module.__dict__["_parameters"] = dict(dict.items(parameters))
        for module in self._compiled:
            if isinstance(module._compiled_call_impl, CompiledCall):
                module._compiled_call_impl = module._compiled_call_impl.original


def _compiled_roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that torch.compile has compiled."""
    if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
        return [module]
    return [root for child in module.children() for root in _compiled_roots(child)]


def put_method(owner: nn.Module, name: str, call: Callable) -> None:
    """Puts a method on one model object, in place of its class's."""
    owner.__dict__[name] = Method(owner, name, call)


def take_method(owner: nn.Module, name: str) -> None:
    owner.__dict__.pop(name, None)


__all__ = ["Gate", "GatedParameters", "Gates", "Hook", "put_method", "take_method"]
