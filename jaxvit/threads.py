"""Work handed to threads, also by a program whose main thread has ended: its other threads may go on working then, but
Python takes no more work for pools."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_starting = threading.Lock()
"""The size of a new thread's stack is the process's: set while one of ours starts, and no longer."""


def submitted(pool: Executor, function: Callable[..., Any], *given: Any) -> Future[Any]:
    """``pool.submit``, or the call done here and now where the pool takes no more."""
    try:
        return pool.submit(function, *given)
    except RuntimeError:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*given))
        except Exception as error:
            done.set_exception(error)
        return done


def with_stack(size: int, function: Callable[..., T], *given: Any) -> T:
    """The call in a thread of its own with a stack of so many bytes, whatever thread it is made from."""
    with ThreadPoolExecutor(1, "jaxvit-compile") as pool:
        with _starting:
            previous = threading.stack_size(size)
            try:
                done = submitted(pool, function, *given)
            finally:
                threading.stack_size(previous)
        return done.result()
