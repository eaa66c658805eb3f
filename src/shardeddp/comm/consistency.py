"""Consistency of writes: a digest of writes to sharded parameters, compared between ranks."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from functools import cache

import torch

from shardeddp.comm.agreement import all_gather_bytes
from shardeddp.comm.host_group import HostGroup

_CHUNK = 1 << 18
"""Chunk of a checksum, in words of 8 bytes: it takes 2 MiB beside the tensor."""

_FACTOR = 6_364_136_223_846_793_005
"""Multiplier between chunks; from Knuth's generator MMIX, any large odd number would do."""


class WriteDigest:
    """Checksums of the writes to parameters since the ranks last compared them.

    A sharded parameter has one value for all ranks, and each rank keeps its shard of the values it
    has written itself. Where ranks write different values, the parameter becomes a mixture of them.
    """

    def __init__(self) -> None:
        self._operations: dict[str, int] = {}  # by fqn
        # 0D tensors on the device of the written parameter.
        self._values: list[tuple[str, torch.Tensor]] = []
        # 0D, by fqn of parameters written to inside of their unit.
        self._states: dict[str, torch.Tensor] = {}
        # Options of the last step, by optimizer and group.
        self._options: dict[tuple[str, int], dict[str, object]] = {}
        # Options changed since the last comparison; None: comparison has ended.
        self._changed: dict[str, str] | None = {}

    def note(self, fqn: str, operation: str, values: torch.Tensor | None = None) -> None:
        """Record a write.

        Args:
            fqn: Name of the parameter.
            operation: Name of the operation that writes.
            values: Whole tensor that is written; None: the operation changes the parameter itself.
        """
        self._operations[fqn] = zlib.crc32(operation.encode(), self._operations.get(fqn, 0))
        if values is not None and values.layout is torch.strided:
            self._values.append((fqn, checksum(values)))

    def note_state(self, fqn: str, values: torch.Tensor) -> None:
        """Record the values of a parameter inside of its unit; only the last record counts."""
        self._states[fqn] = checksum(values)

    def note_options(self, optimizer: str, groups: Sequence[Mapping[str, object]]) -> None:
        """Record the options, numbers and strings, with which an optimizer has stepped."""
        if self._changed is None:
            return
        for index, group in enumerate(groups):
            known = self._options.setdefault((optimizer, index), {})
            for option, value in group.items():
                if isinstance(value, (bool, int, float, str)) and known.get(option) != value:
                    known[option] = value
                    self._changed[_named(option, optimizer, index)] = repr(value)

    def take_changed_options(self) -> dict[str, str]:
        """Return the options that have changed since the last call, with their values."""
        found, self._changed = self._changed or {}, None if self._changed is None else {}
        return found

    def end_options(self) -> dict[str, str]:
        """Return all options with their values, and compare them no more.

        Called once a difference has been reported.
        """
        self._changed = None
        return {
            _named(option, *of): repr(value)
            for of, known in self._options.items()
            for option, value in known.items()
        }

    @property
    def optimizers(self) -> list[str]:
        """Names of the optimizers that have stepped."""
        return sorted({optimizer for optimizer, _ in self._options})

    @property
    def pending(self) -> list[str]:
        """Parameters written to since the last comparison, sorted by name."""
        return sorted({*self._operations, *self._states})

    def take(self) -> dict[str, int]:
        """Return a checksum of all writes since the last call, by parameter."""
        found, values = self._operations, [*self._values, *self._states.items()]
        self._operations, self._values, self._states = {}, [], {}
        for fqn, total in values:
            found[fqn] = zlib.crc32(str(total.item()).encode(), found.get(fqn, 0))
        return found

    def raise_differences(self, written: dict[str, int], ranks: HostGroup) -> None:
        """Name what differs between ranks, a collective: written values, optimizers, or their options.

        Raises:
            RuntimeError: Ranks have written different values. The rest is a warning of rank 0.
        """
        mine = json.dumps([written, self.end_options(), ", ".join(self.optimizers)]).encode()
        said = [json.loads(text) for text in all_gather_bytes(mine, ranks)]
        names = _differing([each for each, _, _ in said])
        if names:
            raise RuntimeError(
                f"parameter {', '.join(names)}: ranks have written different values to it since "
                f"the last backward (this is rank {ranks.rank}), and each has kept its part "
                f"of its own: a sharded parameter has one value for all ranks. Write what all of "
                f"them get alike: average it first (all_reduce), draw it with torch.randn_like() "
                f"of the parameter, or keep it in a buffer, of which each rank has its own. An "
                f"embedding's max_norm writes to the rows that its rank has looked up: limit all "
                f"rows after the optimizer's step instead"
            )
        options, optimizers = [each for _, each, _ in said], [each for _, _, each in said]
        if ranks.rank != 0:
            return
        if len(set(optimizers)) > 1:
            steps = ", ".join(
                f"rank {rank} {it or 'none'}" for rank, it in enumerate(optimizers[:8])
            )
            warnings.warn(
                f"ranks step with different optimizers: {steps}. Each steps on its part of the "
                f"parameters, so parts are trained differently: make the same in "
                f"configure_optimizers() on all ranks",
                stacklevel=2,
            )
            return
        for name in _differing(options):
            values = ", ".join(
                f"{each.get(name, 'none')} on rank {rank}" for rank, each in enumerate(options[:8])
            )
            warnings.warn(
                f"the ranks' optimizers step with different options: {name} is {values}. Each rank "
                f"steps on its part of the parameters, so parts are trained differently. "
                f"Schedulers that follow a metric need the same on all ranks: self.log(..., "
                f"sync_dist=True)",
                stacklevel=2,
            )


def _differing(said: Sequence[Mapping[str, object]]) -> list[str]:
    """The names of which ranks do not all say the same."""
    names = {name for each in said for name in each}
    return sorted(
        name for name in names if any(each.get(name) != said[0].get(name) for each in said)
    )


def _named(option: str, optimizer: str, group: int) -> str:
    return f"{option} of {optimizer}'s group {group}"


@torch.no_grad()
def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return a checksum of every bit and its position: 0D int64, on the tensor's device."""
    octets = values.detach().contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    words = octets[: octets.numel() // 8 * 8].view(torch.int64)
    weights = _weights(values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in (*words.split(_CHUNK), octets[8 * words.numel() :]):
        total = total * _FACTOR + (part * weights[: part.numel()]).sum()  # modulo 2 ** 64
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    # Random: weights that grow with the position have the same sum for all masks that are
    # permutations of each other.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator, device="cpu").to(device)
