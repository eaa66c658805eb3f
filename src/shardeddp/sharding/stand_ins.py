"""Stand-ins: what an element-wise optimizer steps on instead of sharded parameters, on the device or in host memory."""

from __future__ import annotations

import torch

from shardeddp.sharding.memory import empty_on_host
from shardeddp.sharding.shard_tensor import ShardTensor


class StandIns:
    """What an optimizer steps on instead of sharded parameters: this rank's elements, where they live."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The local parameter; always the same object for a parameter."""
        return parameter.raw_local if isinstance(parameter, ShardTensor) else parameter

    def gradient_of(self, local: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of a local parameter, from this rank's part of the sharded one's."""
        return gradient

    def arrive(self) -> None:
        """A step begins."""

    def depart(self) -> None:
        """A step has ended."""


class HostCopies(StandIns):
    """Stand-ins in host memory: gradients are copied there before a step, parameters back after it.

    DeepSpeed's ZeRO-Offload (https://arxiv.org/abs/2101.06840) keeps the states there in the same way. Copies are
    pinned where there is a device that copies from them, and all of a step's travel before one wait for them.
    """

    def __init__(self) -> None:
        self._copies: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}  # by local parameter; with its version
        self._gradients: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}  # by copy: (there, here)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:  # noqa: D102
        if not isinstance(parameter, ShardTensor):
            return parameter
        local = parameter.raw_local
        if local not in self._copies:
            self._copies[local] = (empty_on_host(local, local.device), -1)
        return self._copies[local][0]

    def gradient_of(self, local: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:  # noqa: D102
        if gradient is None:
            self._gradients.pop(local, None)
            return None
        known = self._gradients.get(local)
        host = empty_on_host(gradient, gradient.device) if known is None else known[1]
        self._gradients[local] = (gradient, host)
        return host

    @torch.no_grad()
    def arrive(self) -> None:  # noqa: D102
        for device, host in self._gradients.values():
            host.copy_(device, non_blocking=True)
        for local, (copy, version) in self._copies.items():
            if version != local._version:  # changed by something else than a step
                copy.copy_(local, non_blocking=True)
        self._wait()

    @torch.no_grad()
    def depart(self) -> None:  # noqa: D102
        for local, (copy, _) in self._copies.items():
            if copy in self._gradients:
                local.copy_(copy, non_blocking=True)
                self._copies[local] = copy, local._version + 1  # `parameters_changed` counts one more version

    def _wait(self) -> None:
        if any(local.is_cuda for local in self._copies):
            torch.cuda.current_stream().synchronize()
