"""The optimizer, applied parameter by parameter at the gates.

A shadow of the user's optimizer shares its state, has no hooks, and gets
groups that hold only the parameters of one gate, with the hyper-parameters
that were in force at ``step()``. Whether the sum of such slices equals the
whole step is not believed but tested, once, on toy tensors.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator

import torch
from torch.optim import Optimizer

_HOOK_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def plain_step(optimizer_class: type[Optimizer]) -> Callable:
    """The class's ``step`` without the wrapper that runs hooks, which must not fire per slice."""
    step = optimizer_class.step
    while hasattr(step, "hooked"):
        step = step.__wrapped__
    return step


def make_shadow(optimizer: Optimizer) -> Optimizer:
    """A shallow copy that shares the state and runs no hooks."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # a scheduler's counting wrapper
    shadow.__dict__.pop("zero_grad", None)
    for table in _HOOK_TABLES:
        setattr(shadow, table, OrderedDict())
    return shadow


def snapshot_groups(optimizer: Optimizer) -> list[dict]:
    """Each group's hyper-parameters as they are now, without its parameters."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params" and key != "param_names"
        }
        for group in optimizer.param_groups
    ]


class GatedState(defaultdict):
    """``optimizer.state``: reading it applies pending updates first."""

    def __init__(self, values: dict, synchronize: Callable[[], None]) -> None:
        super().__init__(getattr(values, "default_factory", None) or dict, values)
        self._synchronize = synchronize
        self._ordered = len(values)  # entries whose order is final

    def has_grown(self) -> bool:
        return defaultdict.__len__(self) > self._ordered

    def order_new(self, keys: list) -> None:
        """Brings the entries made since the last call into the order of keys."""
        new = set(list(defaultdict.__iter__(self))[self._ordered :])
        for key in keys:
            if key in new:
                defaultdict.__setitem__(self, key, defaultdict.pop(self, key))
        self._ordered = defaultdict.__len__(self)

    def __getitem__(self, key: object) -> object:
        self._synchronize()
        return defaultdict.__getitem__(self, key)

    def get(self, key: object, default: object = None) -> object:
        self._synchronize()
        return defaultdict.get(self, key, default)

    def __iter__(self) -> Iterator:
        self._synchronize()
        return defaultdict.__iter__(self)

    def __contains__(self, key: object) -> bool:
        self._synchronize()
        return defaultdict.__contains__(self, key)

    def __len__(self) -> int:
        self._synchronize()
        return defaultdict.__len__(self)

    def keys(self):
        self._synchronize()
        return defaultdict.keys(self)

    def values(self):
        self._synchronize()
        return defaultdict.values(self)

    def items(self):
        self._synchronize()
        return defaultdict.items(self)

    def plain(self) -> defaultdict:
        """The same entries without the gate."""
        self._synchronize()
        out = defaultdict(self.default_factory)
        for key in defaultdict.__iter__(self):
            out[key] = defaultdict.__getitem__(self, key)
        return out

    def copy(self) -> defaultdict:
        return self.plain()

    def __deepcopy__(self, memo: dict) -> defaultdict:
        return copy.deepcopy(self.plain(), memo)

    def __copy__(self) -> defaultdict:
        return self.plain()

    def __reduce__(self) -> tuple:
        return self.plain().__reduce__()

    __reduce_ex__ = lambda self, protocol: self.__reduce__()  # noqa: E731


_TOYS_PER_GROUP = 4
_TOY_EDGE = 4
_TOY_STEPS = 3


def why_not_separable(optimizer: Optimizer) -> str:
    """Why the step can't be split by parameter, or "" if it can.

    Runs the whole step beside split steps on toy tensors that have the number
    of dimensions, dtype and device of the real ones, for a few steps, and
    demands the same parameters and state bit for bit. The gradients are far
    apart in size, so that a term across parameters (a norm over all, say)
    shows.
    """
    try:
        whole, split = _toys(optimizer), _toys(optimizer)
        step = plain_step(type(optimizer))
        with torch.enable_grad():
            for round_number in range(_TOY_STEPS):
                before = [_hyper_parameters(g) for g in split.param_groups]
                own_before = _own_attributes(split)
                _give_gradients(whole, round_number)
                _give_gradients(split, round_number)
                step(whole)
                _step_by_slices(split, step)
                after = [_hyper_parameters(g) for g in split.param_groups]
                if not all(_same(b, a) for b, a in zip(before, after, strict=True)):
                    return "it keeps state in its parameter groups"
                if not _same(own_before, _own_attributes(split)):
                    return "it keeps state on itself"
                for ours, theirs in zip(_parameters(split), _parameters(whole), strict=True):
                    if not _same(ours, theirs) or not _same(split.state.get(ours), whole.state.get(theirs)):
                        return "a step over all parameters differs from steps over parts of them"
            for parameter in _parameters(whole):
                parameter.grad = None
            kept = [p.detach().clone() for p in _parameters(whole)]
            step(whole)
            if not all(_same(k, p) for k, p in zip(kept, _parameters(whole), strict=True)):
                return "its step changes parameters that have no gradient"
    except Exception as error:  # whatever it is, the whole step remains right
        return f"its step can't be tried on parts ({type(error).__name__}: {error})"
    return ""


def _toys(optimizer: Optimizer) -> Optimizer:
    """The optimizer over toy parameters with no state."""
    toy = make_shadow(optimizer)
    for key, value in optimizer.__dict__.items():
        if key not in ("state", "param_groups", "defaults", "step", "zero_grad") and not key.startswith("_"):
            toy.__dict__[key] = copy.deepcopy(value)
    toy.state = defaultdict(dict)
    generator = torch.Generator().manual_seed(20190603)
    toy.param_groups = []
    for group, hyper in zip(optimizer.param_groups, snapshot_groups(optimizer), strict=True):
        parameters = []
        for parameter in _varied(group["params"]):
            shape = [min(edge, _TOY_EDGE) for edge in parameter.shape]
            values = torch.randn(shape, generator=generator).to(parameter.device, parameter.dtype)
            parameters.append(torch.nn.Parameter(values))
        toy.param_groups.append({**copy.deepcopy(hyper), "params": parameters})
    return toy


def _varied(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """A few parameters, of as many numbers of dimensions as there are."""
    kinds: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        kinds[parameter.dim(), parameter.dtype, parameter.device].append(parameter)
    chosen: list[torch.Tensor] = []
    for kind in kinds.values():
        chosen += kind[:2]
    if len(chosen) < _TOYS_PER_GROUP:
        chosen += [p for p in parameters if not any(p is c for c in chosen)][: _TOYS_PER_GROUP - len(chosen)]
    if len(chosen) == 1:
        chosen *= 2  # a term across parameters needs two to show
    return chosen


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _give_gradients(optimizer: Optimizer, round_number: int) -> None:
    generator = torch.Generator().manual_seed(round_number)
    for i, parameter in enumerate(_parameters(optimizer)):
        scale = 10.0 ** ((i + round_number) % 4 - 2)
        values = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = values.to(parameter.device, parameter.dtype)


def _step_by_slices(optimizer: Optimizer, step: Callable) -> None:
    """Steps one parameter at a time, the later ones first."""
    groups = optimizer.param_groups
    try:
        for group in reversed(groups):
            for parameter in reversed(group["params"]):
                part = {**group, "params": [parameter]}
                optimizer.param_groups = [part]
                step(optimizer)
                group.update({key: value for key, value in part.items() if key != "params"})
    finally:
        optimizer.param_groups = groups


def _hyper_parameters(group: dict) -> dict:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def _own_attributes(optimizer: Optimizer) -> dict:
    """Numbers and tensors that are attributes of the optimizer itself."""
    return {
        key: copy.deepcopy(value)
        for key, value in vars(optimizer).items()
        if isinstance(value, (int, float, torch.Tensor, list, tuple)) and key != "param_groups"
    }


def _same(one: object, other: object) -> bool:
    """Equal bit for bit, through containers."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.detach(), other.detach())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other
