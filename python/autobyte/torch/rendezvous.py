"""Process groups of our own, and how the ranks' libraries find each other."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from autobyte._lib import AutoByteError, Handle

log = logging.getLogger("autobyte")

#: Longest wait in the store at a time, so that Ctrl-C works.
_STORE_SLICE = timedelta(milliseconds=200)

#: Times wrap() was called for a base group, by the group's name: equal on all
#: its ranks, since all of them wrap.
_wraps: dict[str, int] = {}


def base_group(given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to train in; the default one unless another is given."""
    if not dist.is_available() or not dist.is_initialized():
        raise AutoByteError("torch.distributed is not initialized: call init_process_group() before wrap()")
    group = given if given is not None else dist.distributed_c10d._get_default_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise AutoByteError("this rank is not a member of the given process_group: only its members may call wrap()")
    return group


class Meeting:
    """The groups and names of one wrapped model, equal on all ranks."""

    def __init__(self, base: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(base)
        self.world = dist.get_world_size(base)
        ranks = dist.get_process_group_ranks(base)
        name = getattr(base, "group_name", "default")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _wraps[name] = _wraps.get(name, 0) + 1
        self.job = f"{name}/{restart}/{_wraps[name]}"
        self.incarnation = int(restart) if restart.isdigit() else 0
        backend = _backend(base, device)
        whole_world = len(ranks) == dist.get_world_size()
        extra = {} if whole_world else {"use_local_synchronization": True}
        timeout = _timeout(base, device)
        self.partitions = dist.new_group(ranks, timeout=timeout, backend=backend, **extra)
        self.buffers = dist.new_group(ranks, timeout=timeout, backend=backend, **extra)
        self.source = ranks[0]  # global rank of the group's rank 0
        self._store = dist.PrefixStore(f"autobyte/{self.job}", dist.distributed_c10d._world.pg_map[base][1])

    def connect(self, handle: Handle, timeout_s: float) -> None:
        """Joins the libraries of all ranks; returns when all agree on the tensors."""
        if self.rank == 0:
            self._store.set("rendezvous", handle.rendezvous())
            handle.join(None)
        else:
            handle.join(self._wait_for("rendezvous", timeout_s).decode())
        while not handle.joined():
            pass
        if self.rank == 0:
            self._store.delete_key("rendezvous")  # it holds the job's secret

    def _wait_for(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._store.wait([key], _STORE_SLICE)
                return self._store.get(key)
            except RuntimeError as error:  # DistStoreError is one; PyTorch 2.1 has no check() to ask with
                if time.monotonic() > deadline:
                    raise AutoByteError(
                        f"rank 0 did not reach wrap() within {timeout_s:g} s: every rank of the process group must call it"
                    ) from error


def _backend(base: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries tensors of a device: the base group's own, where it has one for it."""
    known = dist.get_backend_config(base)
    for entry in str(known).split(","):
        kind, _, name = entry.rpartition(":")
        if kind in ("", device.type) and name and name != "undefined":
            return name
    if device.type == "cuda":
        return "nccl"
    return "gloo"


def _timeout(base: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    try:
        return base._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None  # the default


def broadcast_state(tensors: list[torch.Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Gives every rank the values of the group's rank 0, in few large messages."""
    by_kind: dict[tuple, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for kind in by_kind.values():
            for bunch in _bunches(kind):
                flat = torch.cat([t.detach().reshape(-1) for t in bunch])
                dist.broadcast(flat, source, group=group)
                start = 0
                for tensor in bunch:
                    part = flat[start : start + tensor.numel()].view(tensor.shape)
                    with torch.autograd._unsafe_preserve_version_counter(tensor):
                        tensor.detach().copy_(part)
                    start += tensor.numel()


_BUNCH_BYTES = 64 << 20


def _bunches(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Consecutive tensors in groups of about _BUNCH_BYTES."""
    out: list[list[torch.Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if size >= _BUNCH_BYTES:
            out.append([])
            size = 0
        out[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return [bunch for bunch in out if bunch]
