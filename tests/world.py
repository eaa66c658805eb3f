"""A pool of rank processes for the whole test session: run a function on 1 to n ranks, in a fresh world each time.

A test asks the ``world`` fixture for a size and runs a module-level function there; what each rank returns comes back
by rank::

    def total(value: float) -> float:
        number = torch.tensor(value * (1 + dist.get_rank()))
        dist.all_reduce(number)
        return float(number)

    def test_ranks_add_up(world: Worlds) -> None:
        assert world(3).run(total, 2.0) == [12.0, 12.0, 12.0]

On every rank ``torch.distributed`` is initialised (gloo, on loopback), torch has one thread and seed 0, and warnings
are errors. Arguments and results are pickled, so a function has to be importable (not a lambda or a closure), and
results are plain values and plain tensors. All groups are destroyed after the call; nothing of one call is seen by the
next but module state. Environment variables that a test sets do not reach the ranks.

Where a test has nothing to do but to run a function, it can be that function::

    @pytest.mark.parametrize("value", [2.0, 3.0])
    @on_ranks(3)
    def test_ranks_add_up(value: float) -> None:
        assert total(value) == 6 * value

Exceptions: the first rank that fails decides what is raised in the test, with the tracebacks of all of them as its
cause. A call that takes longer than ``timeout_s`` raises :class:`WorldTimeout` with the stacks of the ranks that have
not answered. After either, the pool's processes are killed and the next call gets new ones (about 0.2 s: they are
forked by a server that has torch loaded, which ends with the session).
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardeddp.torch_private import pop_hooks, top_hooks

T = TypeVar("T")

TIMEOUT_S = 110.0
START_TIMEOUT_S = 100.0
GRACE_S = 2.0
"""How long the other ranks may still answer after one has failed; they often wait for it in a collective."""

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
STACKS_AFTER = 0.9
"""The part of a call's time after which its ranks write where they are."""

DEVICE = torch.device(os.environ.get("SHARDEDDP_TEST_DEVICE", "cpu"))
"""Where ranks compute.

``cuda:0``: all of them on that GPU, which NCCL 2.30 and later can where NCCL_MULTI_RANK_GPU_ENABLE is 1. Not through
NVIDIA's MPS: a rank that is killed takes everybody's memory there with it.
"""

FAULTS = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)


class WorldTimeout(Exception):
    """Some ranks did not answer in time."""


class RankDied(Exception):
    """The process of a rank ended in the middle of a call."""


class RemoteTracebacks(Exception):
    """The tracebacks of the ranks that failed, as text; the cause of what a test sees."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank sends back: a pickled result, or a pickled exception (None where it cannot be) and its traceback."""

    payload: bytes | None
    failure: str = ""
    died: bool = False


@dataclass(kw_only=True)
class Rank:
    """One process of the pool, as the test session sees it."""

    process: BaseProcess
    connection: Connection
    stack_file: Path
    answer: Answer | None = None
    answered_at: float = 0.0


class World:
    """The first ``size`` ranks of a pool.

    Args:
        pool: Where the processes are.
        size: Number of ranks.
    """

    def __init__(self, pool: "Pool", size: int) -> None:
        self._pool = pool
        self.size = size

    def run(self, function: Callable[..., T], *args: Any, timeout_s: float = TIMEOUT_S) -> list[T]:
        """Call ``function(*args)`` on every rank and return the results by rank.

        Raises:
            WorldTimeout: Some rank did not return within ``timeout_s`` seconds.
            RankDied: The process of some rank ended.
            Exception: Whatever the function raised on the rank that failed first.
        """
        return self._pool.run(self.size, pickle.dumps((function, args)), timeout_s)


Worlds = Callable[[int], World]


def on_ranks(
    size: int, timeout_s: float = TIMEOUT_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a test that runs it on every rank; its arguments are parametrized, never fixtures."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(world: Worlds, **arguments: Any) -> None:
            world(size).run(
                _run_body, body.__module__, body.__name__, arguments, timeout_s=timeout_s
            )

        signature = inspect.signature(body)
        world = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
        vars(test)["__signature__"] = signature.replace(
            parameters=[*signature.parameters.values(), world]
        )
        return test

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    inspect.unwrap(vars(importlib.import_module(module))[name])(**arguments)


class Pool:
    """Long-lived rank processes; started when first asked for, replaced after a failure."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # What is slow to import; not the package under test, whose failure to import belongs into a test.
        self._context.set_forkserver_preload(
            ["torch.distributed", "torch.testing", "lightning.pytorch", "pytest"]
        )
        self._folder = Path(tempfile.mkdtemp(prefix="world-"))
        self._ranks: list[Rank] = []
        self._calls = 0

    def __call__(self, size: int) -> World:
        """The world of the first ``size`` ranks."""
        return World(self, size)

    def run(self, size: int, call: bytes, timeout_s: float) -> list[Any]:
        """Run a pickled call; see :meth:`World.run`."""
        self._calls += 1
        try:
            self._start_up_to(size)
            ranks = self._ranks[:size]
            for rank in ranks:
                rank.answer = None
                rank.connection.send(
                    (size, str(self._folder / f"store-{self._calls}"), call, timeout_s)
                )
            self._collect(ranks, timeout_s)
            _raise_failures(ranks)
            results = [
                pickle.loads(rank.answer.payload)
                for rank in ranks
                if rank.answer and rank.answer.payload
            ]
            for rank in ranks:
                rank.connection.send("all ranks have answered")
        except BaseException:
            self.kill()
            raise
        return results

    def kill(self) -> None:
        """End all processes at once; the next call starts new ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.connection.close()

    def close(self) -> None:
        """End the pool: idle ranks return by themselves when their connection closes."""
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            rank.process.join(timeout=2.0)
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_up_to(self, size: int) -> None:
        new = [self._start(index) for index in range(len(self._ranks), size)]
        self._ranks += new
        for rank in new:
            if not rank.connection.poll(START_TIMEOUT_S):
                raise WorldTimeout(
                    f"{rank.process.name} had not started after {START_TIMEOUT_S:g} s"
                )
            rank.connection.recv()

    def _start(self, rank: int) -> Rank:
        ours, theirs = self._context.Pipe()
        stack_file = self._folder / f"rank-{rank}.stack"
        process = self._context.Process(
            target=serve, args=(rank, theirs, str(stack_file)), name=f"rank-{rank}", daemon=True
        )
        process.start()
        theirs.close()
        return Rank(process=process, connection=ours, stack_file=stack_file)

    def _collect(self, ranks: Sequence[Rank], timeout_s: float) -> None:
        """Wait until every rank has answered; for a while only once one has failed."""
        failed, deadline = False, time.monotonic() + timeout_s
        while waiting := [rank for rank in ranks if rank.answer is None]:
            left = deadline - time.monotonic()
            ready = wait([rank.connection for rank in waiting], timeout=max(0.0, left))
            if not ready and failed:
                return
            if not ready:
                raise WorldTimeout(_describe_missing(ranks, timeout_s))
            for rank in waiting:
                if rank.connection in ready:
                    rank.answer, rank.answered_at = _receive(rank), time.monotonic()
                    if rank.answer.failure and not failed:
                        failed, deadline = True, time.monotonic() + GRACE_S


def _receive(rank: Rank) -> Answer:
    try:
        return rank.connection.recv()
    except (EOFError, ConnectionError):
        rank.process.join(timeout=1.0)
        stack = rank.stack_file.read_text().rstrip()
        error = RankDied(
            f"{rank.process.name} ended with exit code {rank.process.exitcode} in the middle of a call"
            + (f"; it was here:\n{stack}" if stack else "")
        )
        return Answer(payload=pickle.dumps(error), failure=str(error), died=True)


def _raise_failures(ranks: Sequence[Rank]) -> None:
    failures = [
        (index, rank.answer)
        for index, rank in enumerate(ranks)
        if rank.answer and rank.answer.failure
    ]
    if not failures:
        return
    # A rank that died says nothing itself; those that lost their connection to it are often heard first.
    first = min(failures, key=lambda failure: (not failure[1].died, ranks[failure[0]].answered_at))[
        1
    ]
    text = "\n".join(
        f"--- rank {index} ---\n{answer.failure.rstrip()}" for index, answer in failures
    )
    silent = [index for index, rank in enumerate(ranks) if rank.answer is None]
    if silent:
        text += f"\n--- ranks {silent} had not answered {GRACE_S:g} s later ---"
    error = RuntimeError("a rank failed with what cannot be pickled")
    if first.payload is not None:
        error = pickle.loads(first.payload)
    raise error from RemoteTracebacks(f"\n{text}")


def _describe_missing(ranks: Sequence[Rank], timeout_s: float) -> str:
    """Which ranks have not answered, and where they are."""
    missing = [index for index, rank in enumerate(ranks) if rank.answer is None]
    stacks = "\n".join(
        f"--- rank {index} ---\n{ranks[index].stack_file.read_text().rstrip()}" for index in missing
    )
    return f"ranks {missing} of {len(ranks)} had not answered after {timeout_s:g} s; they were here:\n{stacks}"


# -- on a rank


def serve(rank: int, connection: Connection, stack_file: str) -> None:
    """What a rank process does: answer calls until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session ends its ranks itself
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # or Lightning sets another number
    gc.freeze()  # what is imported stays: collections between calls need not look at it
    with open(stack_file, "a") as stacks, contextlib.suppress(EOFError, ConnectionError):
        faulthandler.enable(stacks)
        _keep_fault_handlers()
        connection.send("ready")
        while True:
            size, store, call, timeout_s = connection.recv()
            stacks.truncate(0)
            # A timer's, not a signal's: a Trainer that ends takes away handlers that Python does not know of.
            faulthandler.dump_traceback_later(STACKS_AFTER * timeout_s, file=stacks)
            with fresh_world(rank, size, store):
                connection.send(answer(call))
                connection.recv()  # nobody leaves while another rank may still be connecting


def _keep_fault_handlers() -> None:
    """A Trainer that ends sets all signals to what Python knows of them, which is not faulthandler's."""
    set_handler = signal.signal

    def set_others(number: int, handler: Any) -> Any:
        return signal.SIG_DFL if number in FAULTS else set_handler(number, handler)

    signal.signal = set_others


@contextlib.contextmanager
def fresh_world(rank: int, size: int, store: str) -> Iterator[None]:
    """Process groups and global state of one call."""
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    on_gpu = DEVICE.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=DEVICE if on_gpu else None,
    )
    yield
    gc.collect()  # what refers to groups in circles
    if dist.is_initialized():
        dist.destroy_process_group()


def answer(call: bytes) -> Answer:
    """Run a pickled call."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings(
                "ignore", "The `srun` command is available"
            )  # a matter of the machine
            function, args = pickle.loads(call)
            found = function(*args)
            check_nothing_is_left()
            return Answer(payload=pickle.dumps(found))
    except BaseException as error:  # noqa: BLE001 - all of them belong to the test
        return Answer(payload=_pickled(error), failure=traceback.format_exc())


def check_nothing_is_left() -> None:
    """Whatever a test has done to models, later ones of the process train as in a new one."""
    left = 0
    while top_hooks(True) is not None:
        pop_hooks()
        left += 1
    assert not left, f"{left} pairs of saved-tensor hooks are set, of forwards that have ended"


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes, if it survives the way there and back."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:  # noqa: BLE001 - whatever stops it, its traceback travels as text
        return None
    return payload
