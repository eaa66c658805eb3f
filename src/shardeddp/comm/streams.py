"""Communication streams: ordered queues beside compute (CUDA streams; nothing at all on CPU)."""

from collections.abc import Callable

import torch

from shardeddp.comm.collectives import CollectiveHandle


class StreamHandle:
    """Handle of an action issued on a stream, for which compute can wait.

    Args:
        pending: Collective at its end.
        done: Event recorded on the stream after the collective, for compute's stream; None on CPU,
            and if nothing was issued.
        device: Device of the stream; None as for ``done``.
    """

    def __init__(
        self,
        pending: CollectiveHandle,
        done: torch.cuda.Event | None,
        device: torch.device | None = None,
    ) -> None:
        self._pending = pending
        self._done = done
        self._device = device

    @property
    def is_ordered(self) -> bool:
        """True if all of it is enqueued, with nothing left to issue once parts are done."""
        return self._done is not None

    def wait(self) -> None:
        """Let later work of compute see the result."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._pending.wait()

    def synchronize(self) -> None:
        """Block the host until the result is there, for use on the host itself."""
        if self._done is not None:
            self._done.synchronize()
        self._pending.wait()


class HostStream:
    """Stream of a CPU run: transfers run in the backend's threads, local work at once."""

    issued: int = 0
    """Number of actions issued."""

    def drain(self) -> None:
        """Do nothing: work of compute on the host is done when its call returns."""

    def issue(
        self, action: Callable[[], CollectiveHandle], *, behind_compute: bool = True
    ) -> StreamHandle:
        """Run ``action`` at once; see :meth:`CudaStream.issue`."""
        self.issued += 1
        return StreamHandle(action(), None)

    def follow_compute(self) -> None:
        """Do nothing: compute on the host has done its work."""


class CudaStream:
    """Ordered queue for communication: a CUDA stream of its own."""

    issued: int = 0
    """Number of actions issued."""

    def __init__(self, device: torch.device) -> None:
        # High priority, so that a collective's few blocks are not queued behind the kernels it
        # should overlap with.
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def drain(self) -> None:
        """Block the host until all actions are done, and all work compute has enqueued so far.

        For memory that is copied to the host, by this stream or by compute itself.
        """
        # Sums that accumulate on the host are copied by compute's stream.
        self.follow_compute()
        self._stream.synchronize()

    def issue(
        self, action: Callable[[], CollectiveHandle], *, behind_compute: bool = True
    ) -> StreamHandle:
        """Run ``action`` on the stream, after everything that compute has enqueued so far.

        That order makes memory safe without ``record_stream``: a buffer that compute has released
        is filled again on the stream only after compute's last use of it, and compute waits for a
        buffer that it allocated before it releases it. Inside of another stream's action, that
        stream takes the role of compute.

        Args:
            action: Function that enqueues the work; called at once.
            behind_compute: False for an action that touches only memory of the host and of this
                stream, with which :meth:`follow_compute` has kept compute in order.
        """
        self.issued += 1
        if behind_compute:
            self.follow_compute()
        with torch.cuda.stream(self._stream):
            pending = action()
        done = torch.cuda.Event()
        done.record(self._stream)
        return StreamHandle(pending, done, self._device)

    def follow_compute(self) -> None:
        """Order later work of the stream after everything that compute has enqueued.

        Inside of another stream's action, that stream takes the role of compute.

        To be called before memory is released that was allocated on the stream and that compute
        has used. Later allocations of the stream follow compute anyway; but with expandable
        segments the allocator may unmap the memory, and waits for the stream alone before it does.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))


CommStream = HostStream | CudaStream
"""Ordered queue for communication."""


def make_stream(device: torch.device) -> CommStream:
    """Return a stream for a device."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
