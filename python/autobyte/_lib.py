"""The Go library through ctypes: what ``autobyte.h`` declares, as one class.

Calls that may block release the GIL; those that only look, and return within
microseconds, keep it, because giving it up costs more than the call.
"""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_uint64
from pathlib import Path

OK, AGAIN, STOPPED, ERROR = 0, 1, 2, -1

#: Longest time in milliseconds that one call blocks, so that Ctrl-C works.
SLICE_MS = 100


class AutoByteError(RuntimeError):
    """What AutoByte can't do, with the reason."""


class Op(ctypes.Structure):
    """One partition to reduce (``ab_op``); offset and bytes are bytes."""

    _fields_ = [
        ("step", c_uint64),
        ("index", c_int32),
        ("space", c_int32),
        ("offset", c_int64),
        ("bytes", c_int64),
    ]


_SIGNATURES: dict[str, list] = {
    "ab_version": [c_char_p, c_int],
    "ab_open": [c_char_p, POINTER(c_int)],
    "ab_rendezvous": [c_int, c_char_p, c_int],
    "ab_join": [c_int, c_char_p],
    "ab_joined": [c_int, c_int],
    "ab_check": [c_int, c_char_p],
    "ab_settings": [c_int, c_char_p, c_int],
    "ab_set_tensors": [c_int, c_char_p, POINTER(c_int32), c_int],
    "ab_layout": [c_int, c_int, POINTER(c_int64), POINTER(c_int32), c_int, POINTER(c_int64), c_int],
    "ab_ready": [c_int, c_int, c_int],
    "ab_close_pass": [c_int, c_int, POINTER(c_uint64), POINTER(c_int)],
    "ab_absent": [c_int, c_uint64, c_int, POINTER(c_int32), c_int, POINTER(c_int)],
    "ab_wait": [c_int, c_int, c_int, c_int, POINTER(c_int)],
    "ab_drain": [c_int, c_int],
    "ab_next": [c_int, c_int, POINTER(Op)],
    "ab_sent": [c_int, c_uint64, c_int],
    "ab_done": [c_int, c_uint64, c_int],
    "ab_failed": [c_int, c_uint64, c_int, c_char_p],
    "ab_configure": [c_int, c_char_p, c_uint64],
    "ab_stats": [c_int, c_char_p, c_int],
    "ab_waiting_for": [c_int, c_char_p, c_int],
    "ab_stop": [c_int],
    "ab_wait_idle": [c_int, c_int, POINTER(c_int)],
    "ab_shutdown": [c_int, c_char_p],
    "ab_errmsg": [c_int, c_char_p, c_int],
}


def library_path() -> Path:
    """Where the Go library is: ``AUTOBYTE_LIBRARY``, or beside this file."""
    given = os.environ.get("AUTOBYTE_LIBRARY")
    return Path(given) if given else Path(__file__).with_name("libautobyte.so")


class _Library:
    """The loaded library, twice: with and without giving up the GIL."""

    def __init__(self) -> None:
        path = library_path()
        if not path.exists():
            raise AutoByteError(
                f"the AutoByte library is not at {path}: install the package with `pip install ./python` "
                "(it needs Go), run `make build`, or name a built library in AUTOBYTE_LIBRARY"
            )
        try:
            self.blocking = ctypes.CDLL(str(path))
            self.quick = ctypes.PyDLL(str(path))
            for name, arguments in _SIGNATURES.items():
                for library in (self.blocking, self.quick):
                    function = getattr(library, name)
                    function.argtypes = arguments
                    function.restype = c_int
        except (OSError, AttributeError) as error:
            raise AutoByteError(
                f"{path} is not a library of this AutoByte version: {error}; build it anew with `make build`"
            ) from error


_loaded: _Library | None = None


class _Forked:
    """What the library is in a forked child. Go's threads did not come along: a call might never return."""

    def __getattr__(self, name: str) -> object:
        if name in ("blocking", "quick"):
            return self
        return self._refuse

    @staticmethod
    def _refuse(*_: object) -> None:
        raise AutoByteError(
            "this process was forked from one that uses AutoByte, which can't be used here: "
            "train in the parent, or start the child with spawn and wrap the model there"
        )


_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def _after_fork() -> None:
    global _loaded
    if _loaded is None:
        return  # the child may load the library itself
    _loaded = _Forked()
    for handle in _handles:
        handle.use(_loaded)


os.register_at_fork(after_in_child=_after_fork)


def load() -> _Library:
    """The library, loaded at the first use."""
    global _loaded
    if _loaded is None:
        _loaded = _Library()
    return _loaded


def _text(function, *before: object) -> str | None:
    """Calls a function that fills a text buffer; None stands for an error."""
    size = 4096
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = function(*before, buffer, size)
        if length < 0:
            return None
        if length < size:
            return buffer.value.decode(errors="replace")
        size = length + 1


def version() -> str:
    """The version of the Go library."""
    return _text(load().quick.ab_version) or ""


class Handle:
    """One rank of one model. Methods raise AutoByteError with the reason."""

    def __init__(self, options: dict) -> None:
        self.use(load())
        _handles.add(self)
        self._run = c_int(0)  # of the thread that trains, the only one that waits for tensors
        self._run_pointer = ctypes.pointer(self._run)
        number = c_int(0)
        self.number = 0
        if self._blocking.ab_open(json.dumps(options).encode(), byref(number)) != OK:
            raise AutoByteError(self.error())
        self.number = number.value

    def use(self, library: _Library | _Forked) -> None:
        """Sets what calls go to."""
        self._blocking, self._quick = library.blocking, library.quick
        self._ready, self._wait_now = library.quick.ab_ready, library.quick.ab_wait

    def error(self) -> str:
        return _text(self._quick.ab_errmsg, self.number) or "unknown error"

    def _check(self, code: int) -> bool:
        """True when done, False when not yet."""
        if code == OK:
            return True
        if code == AGAIN:
            return False
        if code == STOPPED:
            raise AutoByteError("AutoByte was shut down in this process; wrap the model again to go on")
        raise AutoByteError(self.error())

    def _checked_text(self, function) -> str:
        text = _text(function, self.number)
        if text is None:
            raise AutoByteError(self.error())
        return text

    # -- meeting the other ranks

    def rendezvous(self) -> str:
        return self._checked_text(self._quick.ab_rendezvous)

    def join(self, rendezvous: str | None) -> None:
        text = None if rendezvous is None else rendezvous.encode()
        self._check(self._blocking.ab_join(self.number, text))

    def joined(self, wait_ms: int = SLICE_MS) -> bool:
        return self._check(self._blocking.ab_joined(self.number, wait_ms))

    def check(self, what: str) -> None:
        """Raises if this rank can't go on, since a rank is lost or left long ago; what waits for it."""
        self._check(self._quick.ab_check(self.number, what.encode()))

    def settings(self) -> dict:
        return json.loads(self._checked_text(self._quick.ab_settings))

    def configure(self, settings: dict, first_pass: int = 0) -> None:
        self._check(self._quick.ab_configure(self.number, json.dumps(settings).encode(), first_pass))

    # -- layout

    def set_tensors(self, tensors: list[dict], order: list[int] | None) -> None:
        array = None if order is None else (c_int32 * len(order))(*order)
        self._check(
            self._blocking.ab_set_tensors(
                self.number, json.dumps(tensors).encode(), array, 0 if order is None else len(order)
            )
        )

    def layout(self, tensors: int, spaces: int, wait_ms: int = SLICE_MS) -> tuple[list[int], list[int], list[int]] | None:
        """Offsets of the tensors in bytes, the tensors in forward order, sizes of the spaces in bytes; None: not yet."""
        offsets, order, sizes = (c_int64 * tensors)(), (c_int32 * tensors)(), (c_int64 * spaces)()
        if not self._check(self._blocking.ab_layout(self.number, wait_ms, offsets, order, tensors, sizes, spaces)):
            return None
        return list(offsets), list(order), list(sizes)

    # -- training

    def ready(self, tensor: int) -> bool:
        code = self._ready(self.number, tensor, 0)
        if code == OK:
            return True
        if code == AGAIN:
            code = self._blocking.ab_ready(self.number, tensor, SLICE_MS)
        return self._check(code)

    def reduced(self, tensor: int, limit: int = 1) -> int:
        """How many tensors are reduced now, from this one on in forward order, up to limit."""
        self._check(self._wait_now(self.number, tensor, limit, 0, self._run_pointer))
        return self._run.value

    def wait(self, tensor: int, limit: int = 1, wait_ms: int = SLICE_MS) -> int:
        """As ``reduced``, waiting for the first; 0: not yet."""
        self._check(self._blocking.ab_wait(self.number, tensor, limit, wait_ms, self._run_pointer))
        return self._run.value

    def close_pass(self, end_of_step: bool) -> tuple[int, int]:
        """The pass that ended (0: none was open) and its tensors without a gradient."""
        number, absent = c_uint64(0), c_int(0)
        self._check(self._quick.ab_close_pass(self.number, int(end_of_step), byref(number), byref(absent)))
        return number.value, absent.value

    def absent(self, number: int, limit: int, wait_ms: int = SLICE_MS) -> list[int] | None:
        """Tensors without a gradient on any rank in a pass; None: not yet known."""
        array, count = (c_int32 * max(limit, 1))(), c_int(0)
        if not self._check(self._blocking.ab_absent(self.number, number, wait_ms, array, limit, byref(count))):
            return None
        return list(array[: count.value])

    def drain(self, wait_ms: int = SLICE_MS) -> bool:
        return self._check(self._blocking.ab_drain(self.number, wait_ms))

    # -- issuing

    def next(self, op: Op, wait_ms: int = SLICE_MS) -> int:
        """OK with op filled, AGAIN, or STOPPED; raises on an error."""
        code = self._blocking.ab_next(self.number, wait_ms, byref(op))
        if code == ERROR:
            raise AutoByteError(self.error())
        return code

    def done(self, step: int, index: int) -> None:
        self._check(self._quick.ab_done(self.number, step, index))

    def failed(self, step: int, index: int, why: str) -> None:
        self._check(self._quick.ab_failed(self.number, step, index, why.encode()))

    # -- what it knows, and the end

    def stats(self) -> dict:
        return json.loads(self._checked_text(self._quick.ab_stats))

    def waiting_for(self) -> str:
        return self._checked_text(self._quick.ab_waiting_for)

    def stop(self) -> None:
        self._check(self._quick.ab_stop(self.number))

    def shutdown(self, reason: str = "") -> None:
        code = self._blocking.ab_shutdown(self.number, reason.encode())
        if code == ERROR:
            raise AutoByteError(self.error())
