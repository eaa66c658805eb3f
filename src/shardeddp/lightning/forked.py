"""Call in a forked process: what it changes stays there."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

import torch

from shardeddp.errors import ConfigurationError, text_of

T = TypeVar("T")

TIMEOUT_S = 120
"""Seconds after which a forked process is ended."""


def call_in_fork(function: Callable[[], T]) -> T:
    """Return the result of a function that runs in a forked process.

    Whatever the function changes in memory, it changes there: variables, attributes, caches,
    iterators, random states. What it prints and logs is dropped. As in a forked worker of a
    DataLoader, it can use neither a GPU nor other ranks, and threads of this process do not exist.
    The result has to be picklable.

    Raises:
        ConfigurationError: The function failed, or the process did: it could not be forked, died,
            or took longer than ``TIMEOUT_S``.
    """
    if not hasattr(os, "fork"):
        raise ConfigurationError(f"{sys.platform} cannot fork a process")
    receiver, sender = Pipe(duplex=False)
    with receiver, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork with threads: that of a DataLoader is the same
        try:
            process = os.fork()
        except OSError as error:
            sender.close()
            raise ConfigurationError(f"no process could be forked: {error.strerror}") from error
        if process == 0:
            _answer(function, sender)
        sender.close()
        try:
            answer = receiver.recv_bytes()
        except EOFError:
            answer = b""
        except BaseException:
            os.kill(process, signal.SIGKILL)
            raise
        finally:
            _, status = os.waitpid(process, 0)
    if not answer:
        raise ConfigurationError(_reason(os.waitstatus_to_exitcode(status)))
    result, error = pickle.loads(answer)
    if error is not None:
        raise ConfigurationError(error)
    return result


def _answer(function: Callable[[], object], sender: Connection) -> NoReturn:
    """Send the result of a function, or the text of its error, and end the process."""
    try:
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # handlers are the run's
        signal.alarm(TIMEOUT_S)
        gc.freeze()  # what the run holds is not finalized here
        logging.disable()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.stdout = sys.stderr = open(  # noqa: SIM115 - until the process ends
            os.devnull, "w", encoding="utf-8", errors="backslashreplace"
        )
        torch.set_num_threads(1)  # those of OpenMP are not there
        answer: tuple[object, str | None]
        try:
            answer = function(), None
        except ConfigurationError as error:
            answer = None, str(error)
        except BaseException as error:  # noqa: BLE001 - the user's code
            answer = None, f"{type(error).__name__}: {text_of(error)}"
        sender.send_bytes(pickle.dumps(answer))
    finally:
        os._exit(0)  # no handlers of exits, no buffers of the run


def _reason(status: int) -> str:
    """Return why a process has given no answer, from its exit status; negative: a signal's."""
    if status == -signal.SIGALRM:
        return f"it took longer than {TIMEOUT_S} s"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return "its process ended without a result"
