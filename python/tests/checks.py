"""Many small checks in one start of the ranks, and training loops compared with a reference.

A check is a function ``check_...(rank)`` that asserts; it runs on every rank
of the same processes, after the others. An error on one rank ends what the
others wait for, and the rest of the checks, since the ranks no longer agree.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import init_gloo, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: Options under which small models have several partitions, fused and cut.
SMALL = {"partition": 512, "fusion": 256, "credit": 1024}


def names_of_checks(module: dict) -> list[str]:
    return [name for name in module if name.startswith("check_")]


def run_checks(module: str, names: list[str], world: int = 2, timeout_s: float = 240) -> dict[str, str]:
    """Runs the named checks of a module on ranks; the failure of each, "" where it passed everywhere."""
    results = run_ranks(_run_on_rank, world, module, names, timeout_s=timeout_s)
    out = {}
    for name in names:
        texts = [f"rank {rank}: {result[name]}" for rank, result in enumerate(results) if result[name]]
        out[name] = "\n".join(texts)
    return out


def _run_on_rank(rank: int, world: int, module_name: str, names: list[str]) -> dict[str, str]:
    import autobyte.torch as ab
    from autobyte.torch.session import shutdown_all

    init_gloo(20)
    module = importlib.import_module(module_name)
    results = dict.fromkeys(names, "not run: an earlier check left the ranks apart")
    for name in names:
        error = ""
        try:
            getattr(module, name)(rank)
            ab.shutdown()
        except BaseException:  # noqa: BLE001 - it is the result
            error = traceback.format_exc()
            with contextlib.suppress(Exception):
                shutdown_all(None, f"{name} failed on rank {rank}")
        results[name] = error
        try:
            failed = torch.tensor([bool(error)], dtype=torch.int32)
            dist.all_reduce(failed)
        except RuntimeError:
            break
        if failed.item() not in (0, world):
            break
    else:
        dist.barrier()
        dist.destroy_process_group()
    return results


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Data that differs by rank and step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def mlp(*widths: int) -> nn.Sequential:
    widths = widths or (12, 24, 24, 5)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(widths, widths[1:])):
        layers += [nn.Linear(a, b), nn.Tanh()] if i < len(widths) - 2 else [nn.Linear(a, b)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


class ManualAverage(nn.Module):
    """Plain PyTorch in which average() is called after each backward pass; for what DDP can't do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor, 0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def average(self) -> None:
        for p in self.module.parameters():
            if p.grad is not None:
                with torch.no_grad():
                    p.grad.mul_(1.0 / dist.get_world_size())
                    dist.all_reduce(p.grad)


Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def compare(
    rank: int, make: Make, loop: Callable, *, ddp: dict | None = None, reference: Callable | None = None, **options: object
) -> None:
    """Runs ``loop(model, module, optimizer)`` with DDP and with AutoByte; all that it leaves must be equal bit for bit.

    model is what is called, module the user's own. What loop returns is compared too.
    """
    import autobyte.torch as ab

    torch.manual_seed(100 + rank)
    module, optimizer = make()
    model = reference(module) if reference else DistributedDataParallel(module, **(ddp or {}))
    theirs = loop(model, module, optimizer), state_of(module, optimizer)

    torch.manual_seed(100 + rank)
    module, optimizer = make()
    ab.wrap(module, optimizer, **{**SMALL, **options})
    ours = loop(module, module, optimizer), state_of(module, optimizer)
    assert_same(ours, theirs)
    ab.shutdown(module)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    gradients = {name: None if p.grad is None else p.grad for name, p in module.named_parameters()}
    return copy.deepcopy(
        {"model": module.state_dict(), "gradients": detached(gradients), "optimizer": optimizer.state_dict()}
    )


def detached(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: detached(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [detached(entry) for entry in value]
    return value


def assert_same(one: object, other: object, path: str = "") -> None:
    """Equal bit for bit, through containers; names the first place that differs."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        assert same_kind, f"{path}: {one.dtype} {tuple(one.shape)} against {other.dtype} {tuple(other.shape)}"
        if not torch.equal(one, other):
            worst = (one.double() - other.double()).abs().max().item() if not one.is_complex() else float("nan")
            raise AssertionError(f"{path}: differs by {worst}")
    elif isinstance(one, dict) and isinstance(other, dict):
        assert list(one) == list(other), f"{path}: keys {list(one)} against {list(other)}"
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        assert len(one) == len(other), f"{path}: {len(one)} entries against {len(other)}"
        for i, (a, b) in enumerate(zip(one, other)):
            assert_same(a, b, f"{path}.{i}")
    else:
        assert type(one) is type(other) and one == other, f"{path}: {one!r:.80} against {other!r:.80}"


def raises(kind: type[BaseException], *parts: str) -> contextlib.AbstractContextManager:
    """As pytest.raises, but every part must be in the message."""

    @contextlib.contextmanager
    def manager():
        try:
            yield
        except kind as error:
            for part in parts:
                assert part in str(error), f"{part!r} is not in {str(error)!r}"
        else:
            raise AssertionError(f"no {kind.__name__} was raised")

    return manager()


__all__ = [
    "F", "SMALL", "ManualAverage", "adam", "assert_same", "batch", "names_of_checks", "compare", "loss_of", "mlp",
    "raises", "run_checks", "sgd", "state_of",
]  # fmt: skip
