"""``AUTOBYTE=0``: no library, no thread, no scheduler; still right.

A script that was written for AutoByte must not train its ranks apart when it
is switched off. Gradients are averaged at the end of each backward pass, in
buckets of 25 MB, in the arithmetic of DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autobyte.torch.flow import in_backward
from autobyte.torch.gates import Hook, put_method
from autobyte.torch.rendezvous import Broadcaster
from autobyte.torch.updates import check_optimizer

log = logging.getLogger("autobyte")

_BUCKET_BYTES = 25 << 20


class Alone:
    """A model wrapped on one rank: nothing is done, and every call has an answer."""

    in_pass = False

    def __init__(self, model: nn.Module, base: dist.ProcessGroup) -> None:
        self.base = base
        model.__dict__["no_sync"] = contextlib.nullcontext

    def stats(self) -> dict:
        return {"rank": dist.get_rank(self.base), "world_size": dist.get_world_size(self.base)}

    def synchronize(self) -> None:
        pass

    def configure(self, settings: dict, first_pass: int) -> None:
        pass

    def shutdown(self, reason: str = "") -> None:
        pass


class Plain(Alone):
    """Averages gradients at the end of each backward pass."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, base: dist.ProcessGroup) -> None:
        check_optimizer(model, optimizer)
        super().__init__(model, base)
        if dist.get_rank(base) == 0:
            log.warning("AUTOBYTE=0: the scheduler is off, gradients are averaged plainly at the end of each backward pass")
        self._model = model
        self._scale = 1.0 / dist.get_world_size(base)
        self._sync = True
        self._queued = False
        self._buffers_due = True
        self._broadcaster = Broadcaster(base, dist.get_process_group_ranks(base)[0])
        self._broadcaster.send([*model.parameters(), *model.buffers()], "the model's parameters and buffers")
        self._handles = [
            p.register_post_accumulate_grad_hook(Hook(self._on_gradient)) for p in model.parameters() if p.requires_grad
        ]
        self._handles.append(model.register_forward_pre_hook(Hook(self._before_forward), prepend=True))
        self._handles.append(model.register_forward_hook(Hook(self._after_forward)))
        put_method(model, "no_sync", self._no_sync)

    def shutdown(self, reason: str = "") -> None:
        for handle in self._handles:
            handle.remove()
        self._model.__dict__["no_sync"] = contextlib.nullcontext

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._sync and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Every trainable parameter takes part, so that the ranks issue alike."""
        self._queued = False
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        kinds: dict[tuple, list[nn.Parameter]] = {}
        for p in trainable:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        had = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32, device=trainable[0].device)
        dist.all_reduce(had, dist.ReduceOp.MAX, group=self.base)
        somewhere = {id(p) for p, flag in zip(trainable, had.tolist(), strict=True) if flag}
        with torch.no_grad():
            for kind in kinds.values():
                for bucket in _buckets([p for p in kind if id(p) in somewhere]):
                    self._average_bucket(bucket)

    def _average_bucket(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([
            torch.mul(p.grad, self._scale).reshape(-1) if p.grad is not None else torch.zeros_like(p).reshape(-1)
            for p in bucket
        ])  # fmt: skip
        dist.all_reduce(flat, group=self.base)
        start = 0
        for p in bucket:
            part = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
            if p.grad is None:
                p.grad = part.clone()
            else:
                p.grad.copy_(part)

    def _before_forward(self, *_: object) -> None:
        if not in_backward():
            self._queued = False  # a backward pass that failed did not come to its end
        if self._buffers_due:
            self._broadcaster.send(list(self._model.buffers()), "the model's buffers")

    def _after_forward(self, *_: object) -> None:
        self._buffers_due = torch.is_grad_enabled() and self._sync

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    out: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        if not out or size >= _BUCKET_BYTES:
            out.append([])
            size = 0
        out[-1].append(p)
        size += p.numel() * p.element_size()
    return out
