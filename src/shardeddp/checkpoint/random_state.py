"""Random states: every rank's generators as plain tensors, and when a resumed run restores them."""

from __future__ import annotations

import copy
import pickle
import random
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

from shardeddp.checkpoint.read import elements_of
from shardeddp.comm.agreement import gather_to_first
from shardeddp.comm.host_group import HostGroup
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval

RandomState = dict[str, torch.Tensor]
"""State of each generator by its name, 1D uint8."""

RandomStates = dict[str, torch.Tensor]
"""States of all ranks by the generator's name, uint8 ``(ranks, 4 + bytes)``.

A row begins with the number of bytes of the state, 0 for a rank that has none. So a checkpoint of
thousands of ranks has a few tensors of states, and a rank reads its row of each.
"""

_COUNT = struct.Struct("<I")

# Version, words and position, presence of a spare normal number, that number.
_PYTHON = struct.Struct("<I625I?d")
# Words, position, presence of a spare normal number, that number.
_NUMPY = struct.Struct("<624Ii?d")
_BEFORE_FETCH = "before_fetch."
"""Prefix of states captured before the fetch of the batch that the training loop has in hand."""


def capture_random_state(device: torch.device) -> RandomState:
    """Return the state of this process's generators, in fresh tensors on the host.

    Keys are ``python``, ``numpy`` if its generator is the usual Mersenne twister, ``torch``, and
    ``accelerator`` if there is one.
    """
    version, words, left_over = random.getstate()
    state = {
        "python": _tensor(_PYTHON.pack(version, *words, left_over is not None, left_over or 0.0))
    }
    name, keys, position, has_gauss, gauss = cast(
        "tuple[str, np.ndarray[Any, Any], int, int, float]", np.random.get_state(legacy=True)
    )
    if name == "MT19937":
        state["numpy"] = _tensor(_NUMPY.pack(*keys.tolist(), position, bool(has_gauss), gauss))
    state["torch"] = torch.get_rng_state()
    if device.type != "cpu":
        state["accelerator"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore the states of generators; those without a saved state are unchanged."""
    if "python" in state:
        version, *words, has_gauss, gauss = _PYTHON.unpack(_bytes(state["python"]))
        random.setstate((version, tuple(words), gauss if has_gauss else None))
    if "numpy" in state:
        *keys, position, has_gauss, gauss = _NUMPY.unpack(_bytes(state["numpy"]))
        np.random.set_state(
            ("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), gauss)
        )
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "accelerator" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["accelerator"], device)


def gather_random_states(state: RandomState, group: HostGroup) -> RandomStates:
    """Gather all ranks' states on rank 0 ({} on others); a collective. A rank sends about 10 KB."""
    own = {name: _bytes(tensor) for name, tensor in state.items()}
    sent = gather_to_first("saving random states", lambda: pickle.dumps(own), group)
    states: list[dict[str, bytes]] = list(map(pickle.loads, sent))
    names = dict.fromkeys(name for each in states for name in each)
    return {name: _stacked([each.get(name, b"") for each in states]) for name in names}


def _stacked(states: Sequence[bytes]) -> torch.Tensor:
    width = max(map(len, states))
    rows = (_COUNT.pack(len(state)) + state.ljust(width, b"\0") for state in states)
    return _tensor(b"".join(rows)).view(len(states), _COUNT.size + width)


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


class ResumeRandomness:
    """Continues the random numbers of a saved run exactly at the point of the save.

    Between the load of a checkpoint and the first batch, numbers are drawn that the uninterrupted
    run did not draw: to set up the model, for the first iterator of the loader, in hooks. So states
    are held, and restored last:

    - :meth:`begin`, when training starts, restores all generators as they were at the save.
    - In the middle of an epoch a stateful loader begins to iterate anew, and draws a seed for its
      workers: it gets a generator of its own for that, until :meth:`began`.
    - A loader without a length is one batch ahead of the training. :meth:`watch` makes its state
      that of the next batch. The generators then have to be restored as they were when that batch
      was first fetched.
    """

    def __init__(self) -> None:
        self._held: RandomState | None = None
        # Loaders with a temporary generator, until the first batch.
        self._borrowing: list[DataLoader[Any]] = []
        self._watched: list[PrefetchedLoader] = []

    @property
    def holds(self) -> bool:
        """True if there are states that have not been restored yet."""
        return self._held is not None

    def capture(self, device: torch.device) -> RandomState:
        """Return this rank's states for a checkpoint at this moment."""
        if self._held is not None:
            return self._held  # no training has happened since they were loaded
        state = capture_random_state(device)
        for loader in self._watched[:1]:
            state |= {
                _BEFORE_FETCH + name: tensor
                for name, tensor in loader.random_state_in_hand().items()
            }
        return state

    def hold(self, states: object, rank: int, world_size: int) -> None:
        """Hold the states of a checkpoint until training starts; drop those held before.

        Args:
            states: Saved states of all ranks, also in the list form of release 0.1.0; None: the
                checkpoint has none, and none are restored.
            rank: Rank of this process.
            world_size: Number of ranks now. If the checkpoint has another number, its states do not
                apply: rank 0 warns.
        """
        self._held = None
        if states is None:
            return
        count = _num_ranks(states)
        if count == world_size:
            self._held = _state_of(states, rank)  # read now, not when restored
        elif rank == 0:
            ranks = f"{count} rank{'s' * (count != 1)}"
            warnings.warn(
                f"the checkpoint has the random states of {ranks} and this run has "
                f"{world_size}: training continues with fresh random numbers (dropout, shuffling), "
                f"so losses will differ in detail from those of an uninterrupted run. Resume with "
                f"{ranks} for the same numbers",
                stacklevel=2,
            )

    def watch(
        self, loader: object, device: torch.device, *, mid_epoch: bool, in_hand: Callable[[], bool]
    ) -> object:
        """Return the loader to iterate instead of a training loader; only stateful ones differ.

        Args:
            loader: Loader of the Trainer.
            device: Device of this rank.
            mid_epoch: True if the held states are those of the middle of an epoch.
            in_hand: Returns True if the training loop has fetched a batch that it has not trained
                on yet.
        """
        if not isinstance(loader, Stateful):
            return loader
        resumes = self._held is not None and mid_epoch
        if resumes and isinstance(loader, DataLoader) and loader.generator is None:
            # Seeded by numbers that are discarded with all others drawn before `begin`.
            loader.generator = torch.Generator().manual_seed(
                int(torch.randint(2**62, (), device="cpu"))
            )
            self._borrowing.append(loader)
        if has_length(loader):
            return loader
        before = {
            name.removeprefix(_BEFORE_FETCH): tensor
            for name, tensor in (self._held or {}).items()
            if name.startswith(_BEFORE_FETCH) and resumes
        }
        self._watched = [PrefetchedLoader(cast(Any, loader), device, before, in_hand)]
        return self._watched[0]

    def begin(self, device: torch.device) -> None:
        """Restore the held states.

        It has to be called last before the first batch, or the first epoch's end, of a run.
        """
        if self._held is not None:
            held, self._held = self._held, None
            restore_random_state(held, device)

    def began(self) -> None:
        """Remove the loaders' temporary generators; to be called at the first batch."""
        while self._borrowing:
            self._borrowing.pop().generator = None

    def forget(self) -> None:
        """Release a run's loaders and held states."""
        self.began()
        self._held, self._watched = None, []


class LoaderProxy:
    """Proxy of a loader, which subclasses change; its own attributes are in ``vars(self)``."""

    def __init__(self, loader: Any, **own: Any) -> None:
        vars(self).update(loader=loader, **own)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader."""
        return getattr(vars(self)["loader"], name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of the loader, for example Lightning's function that seeds workers."""
        setattr(vars(self)["loader"], name, value)


class PrefetchedLoader(LoaderProxy):
    """Stateful loader without a length: it fetches a batch before the previous one is trained on.

    While a batch is in hand, the loader's state is the one before that batch: a run that resumes
    has to fetch it again. All else is the loader's. States of generators, if any are given, are
    restored before the first fetch.
    """

    def __init__(
        self, loader: Any, device: torch.device, before: RandomState, in_hand: Callable[[], bool]
    ) -> None:
        super().__init__(loader, device=device, before=before, in_hand=in_hand, previous=None)

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches; record states of loader and generators before each."""
        own = vars(self)
        batches = iter(own["loader"])
        while True:
            own["previous"] = (
                copy.deepcopy(own["loader"].state_dict()),
                capture_random_state(own["device"]),
            )
            before, own["before"] = own["before"], {}
            restore_random_state(before, own["device"])
            if before:
                own["previous"] = (own["previous"][0], before)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state at the training's position."""
        own = vars(self)
        if own["previous"] is not None and own["in_hand"]():
            return own["previous"][0]
        return own["loader"].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loader's state."""
        vars(self)["loader"].load_state_dict(state_dict)

    def random_state_in_hand(self) -> RandomState:
        """Return the generators' states before the fetch of the batch in hand; {} without one."""
        own = vars(self)
        return own["previous"][1] if own["in_hand"]() and own["previous"] is not None else {}


def _num_ranks(states: object) -> int:
    """Return the number of ranks that a checkpoint has states of."""
    if isinstance(states, list):
        return len(cast("list[object]", states))
    shapes = [
        tuple(it.shape) if isinstance(it, torch.Tensor) and it.dtype == torch.uint8 else ()
        for it in cast(
            "dict[str, object]", states if isinstance(states, dict) else {"": 0}
        ).values()
    ]
    fitting = [shape for shape in shapes if len(shape) == 2 and shape[1] >= _COUNT.size]
    counts = {shape[0] for shape in fitting}
    if len(counts) != 1 or len(fitting) < len(shapes):
        raise _damaged("one row of bytes for each rank", f"shapes {shapes}")
    return counts.pop()


def _state_of(states: Any, rank: int) -> RandomState:
    """Return the state of one rank; no other state is read."""
    if isinstance(states, list):
        found: Any = states[rank]
        state = cast("dict[str, Any]", found if isinstance(found, dict) else {"": found})
    else:
        state = dict[str, Any]()
        for name, rows in cast("RandomStates", states).items():
            width = rows.shape[1]
            row = elements_of(rows, Interval(rank * width, (rank + 1) * width))
            (count,) = _COUNT.unpack(_bytes(row[: _COUNT.size]))
            if count > width - _COUNT.size:
                raise _damaged(f"at most {width - _COUNT.size} bytes for {name!r}", f"{count}")
            if count:
                state[name] = row[_COUNT.size :][:count]
    for name, tensor in state.items():
        known = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8
        size, number = _size_of(name), tensor.numel() if known else "none"
        if number != size and (size is not None or not known):
            raise _damaged(f"{size} bytes for {name!r} of rank {rank}", f"{number}")
    return {name: tensor.clone() for name, tensor in state.items()}


def _size_of(name: str) -> int | None:
    """Return the bytes of a generator's state; None: the accelerator decides, -1: unknown name."""
    sizes = {
        "python": _PYTHON.size,
        "numpy": _NUMPY.size,
        "torch": torch.get_rng_state().numel(),
        "accelerator": None,
    }
    return sizes.get(name.removeprefix(_BEFORE_FETCH), -1)


def _damaged(expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"the random states in the checkpoint are damaged: expected {expected}, found {found}. "
        f"Load an older checkpoint, or remove them: del checkpoint['shardeddp']"
    )


def has_length(loader: object) -> bool:
    """Return True if a loader knows its number of batches."""
    try:
        len(cast(Any, loader))
    except (TypeError, NotImplementedError):
        return False
    return True
