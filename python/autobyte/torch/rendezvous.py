"""Process groups of our own, and how the ranks' libraries find each other."""

from __future__ import annotations

import ctypes
import logging
import os
import time
import zlib
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from autobyte._lib import AutoByteError, Handle

log = logging.getLogger("autobyte")

#: Pause between looks into the store.
_STORE_PAUSE_S = 0.02

#: Times wrap() was called for a base group, by the group's name: equal on all
#: its ranks, since all of them wrap.
_wraps: dict[str, int] = {}


def base_group(given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to train in; the default one unless another is given."""
    if not dist.is_available() or not dist.is_initialized():
        raise AutoByteError("torch.distributed is not initialized: call init_process_group() before wrap()")
    if given is not None and given != dist.GroupMember.NON_GROUP_MEMBER and not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"wrap(): process_group is a {type(given).__name__}, a torch.distributed.ProcessGroup (from new_group) or None is needed"
        )
    group = given if given is not None else dist.distributed_c10d._get_default_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise AutoByteError("this rank is not a member of the given process_group: only its members may call wrap()")
    return group


class Meeting:
    """The names and groups of one wrapped model, equal on all ranks."""

    def __init__(self, base: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(base)
        self.world = dist.get_world_size(base)
        name = getattr(base, "group_name", "default")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _wraps[name] = _wraps.get(name, 0) + 1
        self.job = f"{name}/{restart}/{_wraps[name]}"
        self.incarnation = int(restart) if restart.isdigit() else 0
        self.source = dist.get_process_group_ranks(base)[0]  # global rank of the group's rank 0
        self._base, self._device = base, device
        self._store = dist.PrefixStore(f"autobyte/{self.job}", dist.distributed_c10d._world.pg_map[base][1])
        self._groups: list[dist.ProcessGroup] = []

    def connect(self, handle: Handle, timeout_s: float) -> None:
        """Joins the libraries of all ranks; returns when all agree on the tensors."""
        if self.rank == 0:
            self._store.set("rendezvous", handle.rendezvous())
            self._store.add("rendezvous there", 1)
            handle.join(None)
        else:
            handle.join(self._wait_for_rendezvous(timeout_s).decode())
        while not handle.joined():
            pass
        if self.rank == 0:
            self._store.delete_key("rendezvous")  # it holds the job's secret

    def new_group(self) -> dist.ProcessGroup:
        """A process group of our own over the same ranks. After connect: making one waits for all
        ranks and can't be interrupted, so they must be there."""
        ranks = dist.get_process_group_ranks(self._base)
        backend, timeout = _backend(self._base, self._device), _timeout(self._base, self._device)
        if len(ranks) == dist.get_world_size():
            group = dist.new_group(ranks, timeout=timeout, backend=backend)
        else:
            # PyTorch names groups by counting them. The ranks outside take no part in this one, so it is not
            # counted: it is named by a number of its own, and the groups that all make later fit together.
            world = dist.distributed_c10d._world
            count, world.group_count = world.group_count, zlib.crc32(f"{self.job}/{len(self._groups)}".encode())
            try:
                group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
            finally:
                world.group_count = count
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Gives the groups back. Nothing may be under way in them."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def abandon(self) -> None:
        """Leaves the groups to the end of the process. gloo waits for what is under way when a group
        is freed, and that may never end; so nothing may free them, not even the interpreter's exit."""
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _wait_for_rendezvous(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        # Asked for with a count, since the store's own waits warn on stderr, and PyTorch 2.1's has no check().
        while self._store.add("rendezvous there", 0) == 0:
            if time.monotonic() > deadline:
                raise AutoByteError(
                    f"rank 0 did not reach wrap() within {timeout_s:g} s: every rank of the process group must call it, "
                        "and a longer timeout= lets it come later"
                )
            time.sleep(_STORE_PAUSE_S)
        return self._store.get("rendezvous")


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


#: Longest wait for a collective at a time, so that Ctrl-C works and a lost rank is noticed.
WORK_SLICE = timedelta(milliseconds=100)

#: Seconds in which the control plane names the rank that made a collective fail.
_BLAME_S = 3.0


class Broadcaster:
    """Gives every rank of a group the values of its rank 0, in few large messages.

    check raises when a rank is gone that a broadcast waits for; what names the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, check: Callable[[str], None] = lambda what: None) -> None:
        self._group, self._source, self._check = group, source, check

    def send(self, tensors: list[torch.Tensor], what: str) -> None:
        by_kind: dict[tuple, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        with torch.no_grad():
            for kind in by_kind.values():
                for bunch in _bunches(kind):
                    self._send_bunch(bunch, what)

    def _send_bunch(self, bunch: list[torch.Tensor], what: str) -> None:
        flat = torch.cat([t.detach().reshape(-1) for t in bunch])
        try:
            work = dist.broadcast(flat, self._source, group=self._group, async_op=True)
            if flat.is_cuda:
                work.wait()  # does not block: it orders the current stream after the broadcast
            else:
                while not has_ended(work):
                    self._check(what)
        except RuntimeError as error:
            if isinstance(error, AutoByteError):
                raise
            raise self._blame(error, what) from error
        start = 0
        for tensor in bunch:
            part = flat[start : start + tensor.numel()].view(tensor.shape)
            with torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.detach().copy_(part)
            start += tensor.numel()

    def _blame(self, error: RuntimeError, what: str) -> AutoByteError:
        """The engine seldom says which rank is at fault; soon the control plane does."""
        deadline = time.monotonic() + _BLAME_S
        while time.monotonic() < deadline:
            try:
                self._check(what)
            except AutoByteError as named:
                return named
            time.sleep(0.02)
        return AutoByteError(f"{what} could not be broadcast: {error}")


def has_ended(work: dist.Work) -> bool:
    """Waits for a slice of time. Raises what made the work fail."""
    try:
        return work.wait(WORK_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False  # the time was over
    return work.wait()


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
