"""Parallel styles: splits of a layer over tensor-parallel ranks, and the collectives of its forward.

A style cuts a layer's parameters and surrounds its forward with functions that are each other's
transposes, as in Megatron-LM (https://arxiv.org/abs/1909.08053, 2205.05198). Layers compute with
plain local tensors: nothing changes for autocast, compilers and third-party kernels.
Outside of split layers, ranks have equal activations, or parts of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn, cast

import torch
from torch import nn

from shardeddp.comm.activations import all_gather, all_reduce, reduce_scatter
from shardeddp.errors import ConfigurationError
from shardeddp.tensor.distributed import Distribution, boxes_along
from shardeddp.tensor.module_hooks import MARK, DividedState

# -- Exchanges: pairs of functions, each the backward of the other


@dataclass(frozen=True)
class TensorAxis:
    """Tensor-parallel or expert-parallel ranks, with the index of this rank among them."""

    group: str
    """Name of their process group."""

    rank: int
    size: int

    rehearsal: Callable[[], AbstractContextManager[None]] | None = None
    """Context of the backward's exchanges, which plans run in the forward; None: no plan."""

    def rehearse(
        self, made: torch.Tensor, exchange: type[torch.autograd.Function], *arguments: object
    ) -> None:
        """Run the backward's exchange on an empty gradient of ``made``, if ``rehearsal`` is set."""
        if self.rehearsal is not None and made.requires_grad:
            with self.rehearsal():
                exchange.apply(torch.empty_like(made, requires_grad=False), *arguments)


def _parts_of_all(tensor: torch.Tensor, dim: int, axis: TensorAxis) -> torch.Tensor:
    return all_gather(tensor, dim, axis.size, axis.group)


def _own_part(tensor: torch.Tensor, dim: int, axis: TensorAxis) -> torch.Tensor:
    _check_divides(tensor, dim, axis)
    return tensor.chunk(axis.size, dim)[axis.rank].clone()


def _own_part_of_sum(tensor: torch.Tensor, dim: int, axis: TensorAxis) -> torch.Tensor:
    _check_divides(tensor, dim, axis)
    return reduce_scatter(tensor, dim, axis.size, axis.group)


_EXCHANGES: Mapping[str, tuple[Callable[[torch.Tensor, int, TensorAxis], torch.Tensor], str]] = {
    # The identity on a tensor that every rank has; its backward sums the gradients, and vice versa.
    "sum_gradient": (lambda tensor, dim, axis: tensor.view_as(tensor), "sum"),
    "sum": (lambda tensor, dim, axis: all_reduce(tensor, axis.group), "sum_gradient"),
    # All-gather along a dim, after which all ranks compute the same; its backward takes this rank's
    # part of the one gradient, and vice versa.
    "gather": (_parts_of_all, "own_part"),
    "own_part": (_own_part, "gather"),
    # All-gather, after which ranks compute different things; its backward is a reduce-scatter.
    "gather_sum_gradient": (_parts_of_all, "sum_own_part"),
    "sum_own_part": (_own_part_of_sum, "gather_sum_gradient"),
}
"""Exchanges by name: the function for the tensor, and the name of the exchange for its gradient."""


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str, dim: int, axis: TensorAxis
    ) -> torch.Tensor:
        function, ctx.transpose = _EXCHANGES[name]
        ctx.dim, ctx.axis = dim, axis
        return function(tensor, dim, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Exchange.apply(gradient, ctx.transpose, ctx.dim, ctx.axis), None, None, None


def _apply_exchange(
    name: str, axis: TensorAxis, tensor: torch.Tensor, dim: int = 0
) -> torch.Tensor:
    """Apply an exchange to a tensor; ``dim`` is the dim of the ranks' parts."""
    made: torch.Tensor = _Exchange.apply(tensor, name, dim, axis)  # type: ignore[assignment]
    axis.rehearse(made, _Exchange, _EXCHANGES[name][1], dim, axis)
    return made


class _FirstAlone(torch.autograd.Function):
    """Identity on the first rank and zeros on the others; the backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        return tensor.view_as(tensor) if axis.rank == 0 else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


def _first_alone(axis: TensorAxis, tensor: torch.Tensor) -> torch.Tensor:
    return _FirstAlone.apply(tensor, axis)  # type: ignore[return-value]


def _check_divides(tensor: torch.Tensor, dim: int, axis: TensorAxis) -> None:
    length = tensor.shape[dim]
    if length % axis.size:
        what = f"a sequence of {length} positions" if dim == SEQUENCE_DIM else f"{length} features"
        raise RuntimeError(
            f"expected a multiple of tensor_parallel_size={axis.size} to split over as many ranks, found "
            f"{what} (dim {dim} of an activation of shape {tuple(tensor.shape)}): pad the sequence, "
            f"or leave styles with 'sequence' out of tensor_parallel_plan"
        )


# -- Styles

SEQUENCE_DIM = 1
"""Dim of the sequence in activations (batch, sequence, features)."""

Split = Literal["columns", "rows", "vocabulary", "features"]


@dataclass(frozen=True, kw_only=True)
class ParallelStyle:
    """Effects of one style on a layer."""

    splits: Split | None = None
    """Dim along which the layer's own parameters are cut; None: they are whole."""

    fused: int = 1
    """Number of equal layers concatenated in one weight."""

    before: str = ""
    """Exchange of the forward's input tensors; see ``_BEFORE``."""

    after: str = ""
    """Exchange of the forward's output tensor; see ``_AFTER``."""

    sums_gradients: bool = False
    """True if ranks have partial gradients of whole parameters: they see other heads or tokens."""


DIVIDE, KEEP = "divide", "keep"
"""Styles of integer attributes such as ``num_heads``: each rank has its part, or all."""

STYLES: Mapping[str, ParallelStyle] = {
    DIVIDE: ParallelStyle(),
    KEEP: ParallelStyle(),
    "colwise": ParallelStyle(splits="columns", before="sum_gradient"),
    "rowwise": ParallelStyle(splits="rows", before="own_features", after="sum"),
    "colwise_gather_output": ParallelStyle(
        splits="columns", before="sum_gradient", after="gather_features"
    ),
    "rowwise_split_input": ParallelStyle(splits="rows", before="split_features", after="sum"),
    "packed_colwise": ParallelStyle(splits="columns", fused=2, before="sum_gradient"),
    "packed_rowwise": ParallelStyle(splits="rows", fused=2, before="own_features", after="sum"),
    "embedding_rowwise": ParallelStyle(splits="vocabulary", before="own_rows", after="sum_rows"),
    "embedding_colwise": ParallelStyle(splits="features", after="gather_features"),
    "replicated_with_grad_allreduce": ParallelStyle(sums_gradients=True),
    "moe_tp_experts": ParallelStyle(before="sum_gradient", after="sum"),
    "moe_identity_expert": ParallelStyle(before="divide"),
    "mla_kv_a_proj": ParallelStyle(after="sum_gradient_of_rope"),
    "all_reduce": ParallelStyle(after="sum"),
    "local_params": ParallelStyle(),
    "replicate": ParallelStyle(),
    "sequence_parallel": ParallelStyle(sums_gradients=True),
    "gather_sequence": ParallelStyle(before="gather_sequence"),
    "rowwise_sequence": ParallelStyle(
        splits="rows", before="own_features", after="sum_split_sequence"
    ),
    "split_sequence": ParallelStyle(after="split_sequence"),
    "split_sequence_input": ParallelStyle(before="split_sequence"),
    "gather_sequence_output": ParallelStyle(after="gather_sequence"),
}
"""Styles by name; the names of transformers have the same effect as there."""

ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a linear layer."""

    inputs: int
    outputs: int
    is_transposed: bool = False
    """True if the weight is (inputs, outputs), as in ``Conv1D`` of transformers."""


def linear_sizes(module: nn.Module) -> LayerSizes | None:
    """Return the sizes of a linear layer from its attributes; None: it is no such layer."""
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    shape = tuple(weight.shape)
    if shape == (getattr(module, "out_features", None), getattr(module, "in_features", None)):
        return LayerSizes(inputs=shape[1], outputs=shape[0])
    if shape == (getattr(module, "nx", None), getattr(module, "nf", None)):
        return LayerSizes(inputs=shape[0], outputs=shape[1], is_transposed=True)
    return None


def distribution_of(
    name: str, module: nn.Module, parameter: nn.Parameter, style: ParallelStyle, axis: TensorAxis
) -> Distribution | None:
    """Return the split of a module's parameter in a style; None: the style does not affect it."""
    shape, ndim = parameter.shape, parameter.dim()
    if style.splits is not None and ndim == 0:
        raise ConfigurationError(
            f"expected parameters with dims in layers that tensor_parallel_plan splits, found {name!r}, "
            f"one number: ranks would have parts of its gradient. Move it to a module around the "
            f"layer, or leave the layer out of the plan"
        )
    wrapper: Callable[[torch.Tensor], torch.Tensor] | None = None
    dim = None
    if style.splits == "columns":
        dim = max(ndim - 2, 0)
    elif style.splits == "rows" and ndim > 1:
        dim = ndim - 1
    elif style.splits == "rows":  # a bias, which is added once
        wrapper = partial(_first_alone, axis)
    elif style.splits is not None:
        dim = 0 if style.splits == "vocabulary" else 1
    elif style.sums_gradients:
        wrapper = partial(_apply_exchange, "sum_gradient", axis)
    else:
        return None
    if dim is None:
        return Distribution(shape=shape, boxes=(), wrapper=wrapper)
    sizes = linear_sizes(module)
    stacked = False
    if sizes is not None and sizes.is_transposed and ndim == 2:
        dim = 1 - dim
        stacked = dim == 1 and style.fused > 1  # else each row of each layer would be a box
    parts = axis.size * style.fused
    if shape[dim] % parts:
        fused = f", which hold {style.fused} layers one behind the other" if style.fused > 1 else ""
        raise ConfigurationError(
            f"expected dims that tensor_parallel_size={axis.size} divides, found {name!r} of shape "
            f"{tuple(shape)}, of which the plan splits the {shape[dim]} elements of dim {dim}"
            f"{fused}. Choose a size that divides them, or leave the layer out of the plan"
        )
    pieces = style.fused if stacked else 1
    part = [size // axis.size // pieces if at == dim else size for at, size in enumerate(shape)]
    return Distribution(
        shape=shape,
        boxes=boxes_along(dim, shape, axis.size, style.fused, stacked=stacked),
        part=torch.Size([pieces, *part] if stacked else part),
        wrapper=partial(_side_by_side, dim) if stacked else None,
    )


def _side_by_side(dim: int, stacked: torch.Tensor) -> torch.Tensor:
    return torch.cat(stacked.unbind(0), dim)


# -- Hooks of split layers


@dataclass(eq=False)
class Siblings:
    """Layers of one module with one input: its gradient is summed once for all of them."""

    given: torch.Tensor | None = None
    taken: torch.Tensor | None = None
    has_history: bool = False
    """True if ``taken`` was made with gradients enabled: a layer under no_grad may come first."""

    def take(self, tensor: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        """Return the tensor with a gradient summed over the ranks; the same one for all layers."""
        recorded = torch.is_grad_enabled()
        if self.given is not tensor or self.taken is None or self.has_history is not recorded:
            self.given, self.has_history = tensor, recorded
            self.taken = _apply_exchange("sum_gradient", axis, tensor)
            if self.taken.requires_grad and not torch.compiler.is_compiling():
                # A recomputation makes it again, and no hook of the outer module sees its end.
                self.taken.register_hook(self._end_backward)
        return self.taken

    def clear(self) -> None:
        """Release the activation."""
        self.given = self.taken = None

    def _end_backward(self, gradient: torch.Tensor) -> None:
        self.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Siblings:
        """Return siblings for the copied layers, without an activation, which may have history."""
        return memo.setdefault(id(self), Siblings())


@dataclass(eq=False)
class SplitLayerState(DividedState):
    """Hooks of one layer, with their state."""

    module: nn.Module
    axis: TensorAxis
    siblings: Siblings | None
    """Layers with the same input; None: no module around marks the end of their forward."""

    name: str = ""
    """Name of the layer, for messages."""

    num_rows: int = 0
    """Number of rows of an embedding on a rank."""

    num_features: int = 0
    """Input features on a rank, of a layer split by rows; 0: it is split in another way."""

    num_outputs: int = 0
    """Output features on a rank, if those of all ranks are gathered; 0: they are not."""

    num_columns: int = 0
    """Columns on a rank, of a transposed weight; 0: it is not transposed, or split by rows."""

    rope_dim: int = 0
    """Trailing features that go to attention without a split layer between (MLA)."""

    outside: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Masks of other ranks' indices, one per embedding forward under way."""

    before: str = ""
    """Exchange of the forward's input tensors; see ``_BEFORE``."""

    after: str = ""
    """Exchange of the forward's output tensor; see ``_AFTER``."""

    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])

    _observe: Callable[[str, torch.Tensor], None] | None = None

    @property
    def has_whole_output(self) -> bool:
        """True if all ranks get the same output, of the whole layer: its gradient has to be equal, too."""
        return self.after in _WHOLE

    def observe_output(self, observe: Callable[[str, torch.Tensor], None] | None) -> None:
        """Call a function in backward with the layer's name and the gradient of its output; or none."""
        self._observe = observe

    def install(self, style: ParallelStyle, *, sums_input: bool = True) -> None:
        """Surround the forward of the layer with the exchanges of its style.

        Unless it ``sums_input``, a module around it sums the gradients of its input.
        """
        vars(self.module)[MARK] = self
        self.before = style.before if sums_input or style.before != "sum_gradient" else ""
        self.after = style.after
        if self.before:
            self.module.register_forward_pre_hook(self.exchange_inputs, with_kwargs=True)
        if self.after:
            # Before hooks of users, which see the output of the whole layer; a split for the layers
            # behind comes after them.
            first = self.after != "split_sequence"
            self.module.register_forward_hook(self.exchange_output, prepend=first)

    def exchange_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook."""
        if not self.is_of(module):
            return None
        is_index = self.before == "own_rows"
        # The forward of a frozen layer, in its dictionary, selects this rank's part of a weight itself.
        weight = None if "forward" in vars(module) else module._parameters.get("weight")
        if weight is not None and is_index and weight.shape[0] != self.num_rows:
            _refuse_whole(self)
        if weight is not None and self.num_columns and weight.shape[1] != self.num_columns:
            _refuse_whole(self)
        keys = [*range(len(args)), *kwargs]
        values = [*args, *kwargs.values()]
        wanted = [
            number
            for number, it in enumerate(values)
            if isinstance(it, torch.Tensor) and it.is_floating_point() != is_index
        ]
        # Experts get weights of the router as well; other layers have one input.
        every = self.before == "sum_gradient" and "weight" not in module._parameters
        for number in wanted if every else wanted[:1]:
            values[number] = _BEFORE[self.before](self, values[number])
        return tuple(values[: len(args)]), dict(
            zip(keys[len(args) :], values[len(args) :], strict=True)
        )

    def exchange_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook."""
        if not self.is_of(module):
            return output
        first, *others = cast("tuple[Any, ...]", output if isinstance(output, tuple) else (output,))
        made = _AFTER[self.after](self, first)
        if not torch.compiler.is_compiling() and self._observe is not None and made.requires_grad:
            made.register_hook(partial(self._observe, self.name))
        return (made, *others) if isinstance(output, tuple) else made


def _sum_gradient(layer: SplitLayerState, tensor: torch.Tensor) -> torch.Tensor:
    if layer.siblings is None:
        return _apply_exchange("sum_gradient", layer.axis, tensor)
    return layer.siblings.take(tensor, layer.axis)


def _own_features(layer: SplitLayerState, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.shape[-1] != layer.num_features:
        raise RuntimeError(
            f"{layer.name!r} is split by rows over tensor_parallel_size={layer.axis.size} ranks: "
            f"expected the {layer.num_features} input features that a rank has of its own, found "
            f"{tensor.shape[-1]}. Split the layer before it with 'colwise' and call it as a module, or give "
            f"this one the style 'rowwise_split_input', or leave it out of tensor_parallel_plan. Inside of "
            f"summon_full_params, torch.func and functional_call parameters are whole: split layers are "
            f"not to be called there"
        )
    return tensor


def _gather_features(layer: SplitLayerState, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.shape[-1] != layer.num_outputs:
        _refuse_whole(layer)
    return _apply_exchange("gather", layer.axis, tensor, tensor.dim() - 1)


def _refuse_whole(layer: SplitLayerState) -> NoReturn:
    raise RuntimeError(
        f"{layer.name!r}, which tensor_parallel_plan splits, was called outside of a step of the "
        f"module, or in summon_full_params: its weight is whole there, and ranks would exchange what "
        f"each has. Call it inside "
        f"of training_step, validation_step, test_step or predict_step, or in a forward of the module"
    )


def _own_rows(layer: SplitLayerState, indices: torch.Tensor) -> torch.Tensor:
    local = indices - layer.axis.rank * layer.num_rows
    outside = (local < 0) | (local >= layer.num_rows)
    layer.outside.append(outside)
    # Indices that no rank has stay out of range: the lookup refuses them, as in one process.
    exists = (indices >= 0) & (indices < layer.axis.size * layer.num_rows)
    return local.masked_fill(outside & exists, 0)


def _sum_rows(layer: SplitLayerState, rows: torch.Tensor) -> torch.Tensor:
    return _sum(layer, rows.masked_fill(layer.outside.pop().unsqueeze(-1), 0))


def _sum(layer: SplitLayerState, tensor: torch.Tensor) -> torch.Tensor:
    return _apply_exchange("sum", layer.axis, tensor)


def _sum_gradient_of_rope(layer: SplitLayerState, tensor: torch.Tensor) -> torch.Tensor:
    sizes = [tensor.shape[-1] - layer.rope_dim, layer.rope_dim]
    compressed, rope = tensor.split(sizes, -1)
    return torch.cat([compressed, _apply_exchange("sum_gradient", layer.axis, rope)], -1)


def _along(dim: int, name: str) -> Callable[[SplitLayerState, torch.Tensor], torch.Tensor]:
    return lambda layer, tensor: _apply_exchange(name, layer.axis, tensor, dim % tensor.dim())


_BEFORE: Mapping[str, Callable[[SplitLayerState, torch.Tensor], torch.Tensor]] = {
    "sum_gradient": _sum_gradient,
    "split_features": _along(-1, "own_part"),
    "gather_sequence": _along(SEQUENCE_DIM, "gather_sum_gradient"),
    "split_sequence": _along(SEQUENCE_DIM, "own_part"),
    "own_features": _own_features,
    "own_rows": _own_rows,
    "divide": lambda layer, tensor: tensor / layer.axis.size,
}
_AFTER: Mapping[str, Callable[[SplitLayerState, torch.Tensor], torch.Tensor]] = {
    "sum": _sum,
    "sum_rows": _sum_rows,
    "sum_split_sequence": _along(SEQUENCE_DIM, "sum_own_part"),
    "split_sequence": _along(SEQUENCE_DIM, "own_part"),
    "gather_sequence": _along(SEQUENCE_DIM, "gather"),
    "gather_features": _gather_features,
    "sum_gradient_of_rope": _sum_gradient_of_rope,
}
_WHOLE = ("sum", "sum_rows", "gather_features", "gather_sequence")


def _clear(siblings: Siblings, module: nn.Module, args: Any, output: Any) -> None:
    siblings.clear()


def forget_inputs_after(module: nn.Module, siblings: Siblings) -> None:
    """Release activations at the end of the forward of a module around split layers."""
    module.register_forward_hook(partial(_clear, siblings), always_call=True)
