"""Communication streams: ordered queues beside compute (CUDA streams; nothing at all on CPU)."""

from collections.abc import Callable

import torch

from shardeddp.comm.collectives import CollectiveHandle


class StreamHandle:
    """Something that was issued on a stream and that compute can wait for.

    Args:
        pending: The collective at its end.
        done: Recorded on the stream after the collective -> waited for by the compute stream. None
            on CPU.
        device: Of the stream; None on CPU.
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
        """Whether all of it is on its way, and nothing has to be issued once parts are done."""
        return self._done is not None

    def wait(self) -> None:
        """Let what compute does from here on see the result."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._pending.wait()

    def synchronize(self) -> None:
        """Block the host until the result is there, for what the host itself does with it."""
        if self._done is not None:
            self._done.synchronize()
        self._pending.wait()

    def advance(self) -> bool:
        """Wait for the collective under way, and issue the one that follows; whether there is one.

        Where streams keep the order all of them have been issued: this waits for the last.
        """
        if self._pending.advance():
            return True
        self.wait()
        return False


class HostStream:
    """The stream of a CPU run: transfers run in the backend's threads, local work at once."""

    issued: int = 0
    """How often something was issued."""

    def drain(self) -> None:
        """Wait for nothing: what compute does on the host is done when it returns."""

    def issue(
        self, action: Callable[[], CollectiveHandle], *, behind_compute: bool = True
    ) -> StreamHandle:
        """Run ``action`` at once; see :meth:`CudaStream.issue`."""
        self.issued += 1
        return StreamHandle(action(), None)

    def follow_compute(self) -> None:
        """Follow nothing: compute is done with what it has been given."""


class CudaStream:
    """An ordered queue for communication: a CUDA stream of its own."""

    issued: int = 0
    """How often something was issued."""

    def __init__(self, device: torch.device) -> None:
        # High priority, so that a collective's few blocks are not queued behind the kernels it
        # should overlap with.
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def drain(self) -> None:
        """Block the host until everything issued is done, and what compute has enqueued so far.

        For what is copied to host memory, there or by compute itself.
        """
        # Sums that accumulate on the host are copied by compute's stream.
        self.follow_compute()
        self._stream.synchronize()

    def issue(
        self, action: Callable[[], CollectiveHandle], *, behind_compute: bool = True
    ) -> StreamHandle:
        """Run ``action`` on the stream, behind everything that compute has enqueued so far.

        That order is what makes memory safe without ``record_stream``: a buffer that compute has
        released is filled again on the stream only after compute's last use of it, and a buffer
        that compute allocated is waited for by compute before it is released. Inside of another
        stream's action, that one stands in the place of compute.

        Args:
            action: Runs at once, and enqueues.
            behind_compute: False for what touches only memory of the host and of this stream, with
                which :meth:`follow_compute` has kept compute in order.
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
        """Let what the stream does from here on come behind everything compute has enqueued.

        To be called before memory is released that was allocated on the stream and that compute
        has used. What the stream allocates next is behind compute anyway; but with expandable
        segments the allocator may unmap the memory, and waits for the stream alone before it does.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))


CommStream = HostStream | CudaStream
"""An ordered queue for communication."""


def make_stream(device: torch.device) -> CommStream:
    """The stream that suits a device."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
