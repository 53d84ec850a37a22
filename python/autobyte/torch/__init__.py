"""AutoByte for PyTorch.

    import autobyte.torch as ab
    model, optimizer = ab.wrap(model, optimizer)   # after init_process_group; nothing else changes
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from autobyte import config
from autobyte._lib import AutoByteError
from autobyte.torch.plain import Alone, Plain
from autobyte.torch.rendezvous import base_group
from autobyte.torch.session import Session, install_process_hooks, session_of, sessions, shutdown_all, shutdown_one
from autobyte.torch.slots import is_registered

__all__ = ["AutoByteError", "configure", "shutdown", "stats", "synchronize", "wrap"]


def wrap(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    partition: int | str | None = None,
    credit: int | str | None = None,
    fusion: int | str | None = None,
    engine: str | None = None,
    policy: str | None = None,
    timeout: float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Averages the model's gradients over the ranks, in the order the next forward pass needs them.

    Returns the same two objects. Every rank of the process group must call it
    with the same model; rank 0's parameters and buffers are given to all. The
    script stays as it is: ``state_dict`` keys do not change, ``param.grad``
    reads as the averaged gradient, and with one rank nothing happens at all.

    Args:
        model: on the CPU or on CUDA devices, not in DistributedDataParallel.
        optimizer: over parameters of the model.
        partition: largest size of one communicated piece, bytes or ``"4MiB"``.
        credit: bytes that may be under way at once.
        fusion: tensors smaller than this travel together, up to this size; 0 fuses none.
        engine: ``"auto"`` or ``"external"`` (torch.distributed carries the pieces).
        policy: ``"priority"`` (what the next forward pass needs first goes first) or ``"fifo"``.
        timeout: seconds of silence after which a rank counts as lost (60).
        process_group: the ranks to average over; the default group if None.

    An argument beats its ``AUTOBYTE_*`` variable; ``AUTOBYTE=0`` switches the
    scheduler off and averages plainly at the end of each backward pass.

    Raises:
        OptionError (a ValueError): an option that can't be used.
        ValueError, TypeError: a model or an optimizer that can't be wrapped.
        AutoByteError: the ranks don't fit together, or one did not come.
    """
    options = config.resolve(
        partition=partition, credit=credit, fusion=fusion, engine=engine, policy=policy, timeout=timeout
    )
    enabled = config.is_enabled()
    _refuse_wrapped(model)
    base = base_group(process_group)
    install_process_hooks()
    if dist.get_world_size(base) == 1:
        sessions[model] = Alone(model, base)
    elif not enabled:
        sessions[model] = Plain(model, optimizer, base)
    else:
        sessions[model] = Session(model, optimizer, options, base)
    return model, optimizer


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"wrap(): the model is a {type(model).__name__}, a torch.nn.Module is needed")
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            raise ValueError(
                f"wrap(): the model is in {type(module).__name__}, which averages gradients itself: "
                "remove that line, or pass the model inside it (model.module)"
            )
        if module in sessions:
            raise ValueError("wrap(): the model is wrapped already; call ab.shutdown() first to wrap it anew")
    for name, p in model.named_parameters():
        if is_registered(p):
            raise ValueError(f"wrap(): parameter {name} belongs to another wrapped model: wrap one model that holds both")


def configure(
    model: nn.Module,
    *,
    partition: int | str | None = None,
    credit: int | str | None = None,
    fusion: int | str | None = None,
    policy: str | None = None,
    first_pass: int = 0,
) -> None:
    """Changes knobs while training, from a backward pass on (at the earliest the next).

    Rank 0's call decides; the other ranks may call it too, to no effect.
    Training does not stall and nothing is copied. With one rank it does nothing.
    Sizes and policy are given as to ``wrap``; first_pass counts backward passes from 1.
    """
    options = config.Options()
    if partition is not None:
        options.partition = config.parse_size(partition, "partition", 64)
    if credit is not None:
        options.credit = config.parse_size(credit, "credit", 1)
    if fusion is not None:
        options.fusion = config.parse_size(fusion, "fusion", 0)
    if policy is not None:
        options.policy = config.resolve(policy=policy).policy
    if isinstance(first_pass, bool) or not isinstance(first_pass, int) or first_pass < 0:
        raise config.OptionError(f"first_pass={first_pass!r}: the number of a backward pass, counted from 1, or 0 for the next one")
    session_of(model).configure(options.settings(), first_pass)


def stats(model: nn.Module) -> dict:
    """What this rank has done so far, with units in the keys (bytes, seconds as ``_s``)."""
    return session_of(model).stats()


def synchronize(model: nn.Module) -> None:
    """Waits for all gradients under way and applies all pending updates."""
    session_of(model).synchronize()


def shutdown(model: nn.Module | None = None) -> None:
    """Finishes what is under way and leaves the model, or all models, plain. Also done at exit."""
    if model is None:
        shutdown_all()
    elif not isinstance(model, nn.Module):
        raise TypeError(f"shutdown(): a {type(model).__name__} was given, a model or nothing is needed")
    elif model in sessions:
        shutdown_one(model)
