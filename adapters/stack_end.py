"""Where a greenlet's C stack ends, said so that a walk over it stops there.

For every error that torch raises in C++, caught or not, it walks the C stack (`backtrace`). Greenlets share one stack:
below the frames of one lie those of whoever runs now, not of whoever started it. A walk that leaves a greenlet's frames
takes leftovers for return addresses, and some die of it (SIGSEGV within 20,000 errors, torch 2.13, measured by
`tests/test_stack_end.py` without what is here). So a greenlet runs inside a few instructions of machine code that have
no unwind table: a walk that comes to them knows no way further, which is how walks end. A switch costs 40 ns more.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

# A C function that calls its first argument with its second.
_CODE = {
    # endbr64; sub rsp, 8; mov rax, rdi; mov rdi, rsi; call rax; add rsp, 8; ret
    "x86_64": "f30f1efa 4883ec08 4889f8 4889f7 ffd0 4883c408 c3",
    # stp x29, x30, [sp, #-16]!; mov x2, x0; mov x0, x1; blr x2; ldp x29, x30, [sp], #16; ret
    "aarch64": "fd7bbfa9 e20300aa e00301aa 40003fd6 fd7bc1a8 c0035fd6",
}
_PROT_READ, _PROT_EXEC, _MAP_PRIVATE = 1, 4, 2


class _Call:
    """A call on its way through C, where no exception gets through."""

    __slots__ = ("error", "run")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.error: BaseException | None = None


def _enter(call: _Call) -> None:
    try:
        call.run()
    except BaseException as error:
        call.error = error


_Function = ctypes.PYFUNCTYPE(None, ctypes.py_object)
_ENTER = _Function(_enter)


@functools.cache
def _through() -> Callable[[Any, _Call], None] | None:
    """The machine code as a function; None where there is none for this machine, or where it may not be run."""
    code = _CODE.get(platform.machine()) if sys.platform == "linux" else None
    if code is None:
        return None
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    try:
        file = os.memfd_create("tapgrid")
    except OSError:
        return None
    try:
        os.write(file, bytes.fromhex(code))
        # Of a file, so that the memory is never writable and executable at once.
        address = libc.mmap(None, 64, _PROT_READ | _PROT_EXEC, _MAP_PRIVATE, file, 0)
    finally:
        os.close(file)
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    return ctypes.PYFUNCTYPE(None, _Function, ctypes.py_object)(address)


def run_at_an_end(run: Callable[[], None]) -> None:
    """Call `run()` where a walk over the C stack ends; what it raises is raised here.

    >>> run_at_an_end(lambda: print("hello"))
    hello
    """
    through = _through()
    if through is None:
        run()
        return
    call = _Call(run)
    through(_ENTER, call)
    if call.error is not None:
        try:
            raise call.error
        finally:
            call.error = None
