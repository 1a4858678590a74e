"""Work handed to threads, also by a program whose main thread has ended: its other threads may go on working then, but
Python takes no more work for pools."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


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
