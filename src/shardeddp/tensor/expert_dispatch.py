"""Dispatch of tokens to the ranks that hold their experts, and back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardeddp.comm.activations import all_to_all
from shardeddp.comm.agreement import ABOUT_EXPERTS
from shardeddp.tensor.module_hooks import DividedState, ModuleHook, state_of
from shardeddp.tensor.parallel_styles import TensorAxis
from shardeddp.torch_private import never_traced

_Counts = tuple[int, ...]


class _RowExchange(torch.autograd.Function):
    """All-to-all of rows between ranks; its backward sends the gradients back.

    ``anchors`` make the result require a gradient on all ranks, also on those without rows: a
    rank without the exchange in its backward would make the others wait.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        leaving: _Counts,
        arriving: _Counts,
        group: str,
        *anchors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.leaving, ctx.arriving, ctx.group = leaving, arriving, group
        ctx.shapes = [(it.shape, it.dtype, it.device) for it in anchors]
        return all_to_all(rows, leaving, arriving, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        back = _RowExchange.apply(gradient, ctx.arriving, ctx.leaving, ctx.group)
        # An anchor with elements gets its gradient through other uses anyway.
        anchors = [
            None if shape.numel() else torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype, device in ctx.shapes
        ]
        return back, None, None, None, *anchors


def _send_rows(
    rows: torch.Tensor,
    leaving: _Counts,
    arriving: _Counts,
    axis: TensorAxis,
    *anchors: torch.Tensor,
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        # Compiled code cannot call a Function with a variable number of operands then.
        return all_to_all(rows, leaving, arriving, axis.group)
    made: torch.Tensor = _RowExchange.apply(rows, leaving, arriving, axis.group, *anchors)  # type: ignore[assignment]
    axis.rehearse(made, _RowExchange, arriving, leaving, axis.group)
    return made


@dataclass(kw_only=True, eq=False)
class DividedExperts(DividedState):
    """State of a module of experts that are divided over ranks."""

    module: nn.Module
    count: int
    axis: TensorAxis
    is_sent: bool
    """True once tokens were sent to them; always for a list, where other ranks' experts fail."""

    name: str
    """Name of the module."""

    most: int
    """Highest number of experts of a rank in any layer: layers tell their counts in equal sizes."""

    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    breaks_graphs: bool = False

    def note_sent(self) -> None:
        """Note that tokens were sent to the experts."""
        self.is_sent = True


def divided_experts(root: nn.Module) -> list[DividedExperts]:
    """Return the experts of a model that are divided over ranks."""
    return [it for module in root.modules() if (it := _divided(module)) is not None]


def end_forward(divided: DividedExperts) -> None:
    """Tell other expert ranks that a forward has ended; a collective of them.

    It arrives where a rank that is still in the forward expects counts, which then raises. Without
    it that rank would get gradients as counts, or wait.
    """
    axis, parameter = divided.axis, next(divided.module.parameters())
    lengths = [divided.most + 1] * axis.size
    message = torch.full((sum(lengths),), _FORWARD_ENDED, device=parameter.device)
    all_to_all(message, lengths, lengths, axis.group)


_FORWARD_ENDED = -1
"""Number in place of a layer's checksum, which is not negative."""


@dataclass(kw_only=True, eq=False)
class ForeignExpert(ModuleHook):
    """An expert in a list that belongs to another rank."""

    module: nn.Module
    name: str

    def refuse_call(self, module: nn.Module, args: object) -> None:
        """Refuse the forward of the expert, but not that of a copy; a pre-hook."""
        if self.is_of(module):
            raise RuntimeError(
                f"{self.name!r} is an expert of another rank: its parameters have no elements on this "
                f"rank. Send tokens with routed = TokenDispatch(index, experts), and call the experts of "
                f"routed.experts alone"
            )


class TokenDispatch:
    """One layer's tokens on their way to the experts that a router has chosen for them, and back.

    Every rank makes one at the same position of its forward, dispatches and combines once::

        routed = TokenDispatch(index, self.experts)
        tokens = routed.dispatch(x)
        parts = tokens.split(routed.counts)
        y = torch.cat([self.experts[e](part) for e, part in zip(routed.experts, parts)])
        x = (routed.combine(y) * weights.unsqueeze(-1)).sum(1)

    Args:
        index: Experts of each token, integers of shape (tokens, k).
        experts: Module of the experts: an ``nn.ModuleList``, or one with a row for each in its
            parameters. If the strategy has not divided it, this rank has all experts. Or the
            number of experts.
        mesh: Expert ranks, if ``experts`` is a number: ``strategy.device_mesh["expert_parallel"]``;
            without them this rank has all experts.

    Raises:
        ValueError: ``index`` is not 2D, of integers and in range, or the ranks do not divide the
            number of experts.
    """

    experts: range
    """Indices of this rank's experts."""

    counts: list[int]
    """Number of rows received for each expert in :attr:`experts`."""

    def __init__(
        self,
        index: torch.Tensor,
        experts: nn.Module | int,
        mesh: DeviceMesh | TensorAxis | None = None,
    ) -> None:
        if isinstance(mesh, DeviceMesh):
            mesh = expert_axis(mesh)
        self._divided: DividedExperts | None = None
        if isinstance(experts, nn.Module):
            num_experts, mesh = _number_and_axis(experts, mesh)
            self._divided = _divided(experts)
        else:
            num_experts = experts
        self._axis = mesh
        size, rank = (1, 0) if mesh is None else (mesh.size, mesh.rank)
        if index.ndim != 2 or num_experts % size:
            raise ValueError(
                f"expected experts of tokens as (tokens, k), and a number of experts that {size} "
                f"ranks divide, found shape {tuple(index.shape)} and {num_experts} experts"
            )
        own = num_experts // size
        self.experts = range(rank * own, (rank + 1) * own)
        self._shape = tuple(index.shape)
        flat = index.reshape(-1)
        self._order = flat.argsort(stable=True)
        sent = _counts(flat, num_experts).view(size, own)
        # Of each rank, rows for each of the experts here, and the layer that it sends them to.
        layer, most = 0, own
        if self._divided is not None:
            layer, most = crc32(self._divided.name.encode()), self._divided.most
        received = torch.cat([sent, sent.new_full((size, most + 1 - own), layer)], 1)
        if mesh is not None:
            lengths = [most + 1] * size
            received = all_to_all(received.view(-1), lengths, lengths, mesh.group).view(size, -1)
        both = torch.cat([sent, received], 1).tolist()  # the one transfer to the host
        if any(row[-1] != layer for row in both):
            self._refuse_other_layer(any(row[-1] == _FORWARD_ENDED for row in both))
        self._leaving = tuple(sum(row[:own]) for row in both)
        self._arriving = tuple(sum(row[own : 2 * own]) for row in both)
        self.counts = [sum(row[own + at] for row in both) for at in range(own)]
        # Rows arrive ordered by rank, and are reordered by expert.
        numbers = torch.arange(own, device=index.device).repeat(size)
        every = received[:, :own].reshape(-1)
        by_rank = numbers.repeat_interleave(every, output_size=sum(self._arriving))
        self._by_expert = by_rank.argsort(stable=True)
        self._anchor: torch.Tensor | None = None
        self._calls: int | None = None  # of the experts' module, at the dispatch

    def _calls_so_far(self) -> int | None:
        """Return the number of calls of the experts' module; None: it is unknown, or runs."""
        divided = self._divided
        return None if divided is None else _calls_of(divided)

    def _refuse_without_call(self) -> NoReturn:
        """Refuse outputs that were computed without a call of the experts' module."""
        assert self._divided is not None
        raise RuntimeError(
            f"TokenDispatch.combine() got rows that {self._divided.name!r} has not computed: the "
            f"module was not called since dispatch(). Only inside of its forward its parameters are "
            f"this rank's experts; elsewhere they are all experts. Call the module, "
            f"self.experts(...), instead of its methods or functions of its parameters"
        )

    def _refuse_other_layer(self, ended: bool) -> NoReturn:
        """Refuse what another rank has sent, for the experts of another layer or after its forward."""
        name = "" if self._divided is None else f" of {self._divided.name!r}"
        others = "another rank's forward has ended" if ended else "others to those of another layer"
        raise RuntimeError(
            f"ranks send tokens to experts of different layers at a time; this one to those{name}, "
            f"{others}. {ABOUT_EXPERTS}"
        )

    @property
    def index(self) -> torch.Tensor:
        """Index in :attr:`experts` of each received row's expert, (rows,)."""
        counts = torch.tensor(self.counts, device=self._order.device)
        numbers = torch.arange(len(self.experts), device=counts.device)
        return numbers.repeat_interleave(counts, output_size=sum(self.counts))

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Send tokens to the ranks of their experts; a collective of the expert ranks.

        Args:
            tokens: Activations of this rank, (tokens, features).

        Returns:
            Rows received here, (rows, features), ordered by expert; an expert may have none.
        """
        rows = tokens[self._order // self._shape[1]]
        if self._axis is not None:
            rows = _send_rows(rows, self._leaving, self._arriving, self._axis, _trained(rows))
        self._anchor = rows
        self._calls = self._calls_so_far()
        return rows[self._by_expert]

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Send the experts' outputs back to the tokens' ranks; a collective of the expert ranks.

        Args:
            rows: Outputs in the order of :meth:`dispatch`'s result, (rows, features).

        Returns:
            Outputs of each token's experts, (tokens, k, features).
        """
        if self._anchor is None:
            raise RuntimeError("combine() before dispatch(): nothing is to be sent back")
        if rows.shape[:1] != self._by_expert.shape:
            raise ValueError(
                f"expected the rows that dispatch() has returned, expert by expert, "
                f"{self._by_expert.numel()} of them, found shape {tuple(rows.shape)}"
            )
        if rows.shape[0] and self._calls is not None and self._calls == self._calls_so_far():
            self._refuse_without_call()
        anchor, self._anchor = self._anchor, None
        sent = torch.empty_like(rows).index_copy(0, self._by_expert, rows)
        if self._axis is not None:
            sent = _send_rows(
                sent, self._arriving, self._leaving, self._axis, anchor, _trained(sent)
            )
        back = torch.empty_like(sent).index_copy(0, self._order, sent)
        return back.view(*self._shape, *back.shape[1:])


@never_traced("the number of calls of a module of experts is read here")
def _calls_of(divided: DividedExperts) -> int | None:
    return divided.num_calls if divided.counts_calls and not divided.is_running else None


def _divided(experts: nn.Module) -> DividedExperts | None:
    divided = state_of(experts)
    return divided if isinstance(divided, DividedExperts) else None


def _counts(numbers: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the number of rows for each expert."""
    if not numbers.is_floating_point():
        with suppress(RuntimeError):  # for negative numbers
            counts = torch.bincount(numbers, minlength=num_experts)
            if counts.numel() == num_experts:
                return counts
    found = f"{numbers.min().item()} to {numbers.max().item()}, {numbers.dtype}"
    raise ValueError(
        f"expected whole numbers of experts, 0 to {num_experts - 1}, found {found}: a token that is to "
        f"be dropped keeps an expert, and has the weight 0"
    )


def _number_and_axis(experts: nn.Module, axis: TensorAxis | None) -> tuple[int, TensorAxis | None]:
    if (divided := _divided(experts)) is not None:
        divided.note_sent()
        return divided.count, divided.axis
    if isinstance(experts, nn.ModuleList):
        return len(experts), axis
    counts = {it.shape[0] if it.ndim else 0 for it in experts.parameters()}
    if len(counts) != 1:
        raise ValueError(
            f"expected an nn.ModuleList of experts, a module whose parameters have one row for each "
            f"expert, or a number, found {type(experts).__name__} with rows {sorted(counts)}"
        )
    return counts.pop(), axis


def _trained(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(0).requires_grad_()


def expert_axis(mesh: DeviceMesh) -> TensorAxis:
    """Return the expert ranks of a device mesh with one axis."""
    return TensorAxis(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


class Routing(ModuleHook):
    """Hooks of a transformers module of stacked experts, with a forward written for one rank alone.

    Its forward takes ``hidden_states`` (tokens, features), ``top_k_index`` and ``top_k_weights``
    (tokens, k), and returns the weighted sum of the experts' outputs for each token.
    """

    ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")

    def __init__(self, module: Any, axis: TensorAxis) -> None:
        self.module, self._axis = module, axis
        self._under_way: tuple[TokenDispatch, torch.Tensor] | None = None

    def install(self) -> None:
        """Set the hooks."""
        self.module.register_forward_pre_hook(self._before, with_kwargs=True)
        self.module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self.is_of(module):
            return None
        tokens, index, weights = (*args, *(kwargs[it] for it in self.ARGUMENTS[len(args) :]))
        routed = TokenDispatch(index, module)
        arrived = routed.dispatch(tokens)
        self._under_way = routed, weights
        ones = weights.new_ones(arrived.shape[0], 1)
        return (arrived, routed.index.to(index.dtype).unsqueeze(1), ones), {}

    def _after(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not self.is_of(module):
            return None
        assert self._under_way is not None
        (routed, weights), self._under_way = self._under_way, None
        each = routed.combine(output)
        return (each * weights.unsqueeze(-1)).sum(1).to(each.dtype)
