"""Tensor-parallel plans: which layers of a model are split, and how, by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardeddp.errors import ConfigurationError, first_three, nearest
from shardeddp.tensor.distributed import Distribution, local_part, replace_parameters
from shardeddp.tensor.module_hooks import DividedCount, refuse_split
from shardeddp.tensor.parallel_styles import (
    ALIASES,
    DIVIDE,
    KEEP,
    STYLES,
    ParallelStyle,
    Siblings,
    SplitLayerState,
    TensorAxis,
    distribution_of,
    forget_inputs_after,
    linear_sizes,
)
from shardeddp.wrap.tree import has_forward, join, memory_of

TensorPlan = Literal["auto"] | Mapping[str, Any]
"""``auto``, or styles by pattern of names: a style's name, several of them, or a style of torch."""


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One layer, or one parameter or number of it, that a plan names."""

    name: str
    style_name: str
    style: ParallelStyle | TorchStyle
    module: nn.Module
    parameter: str = ""
    """Name in the module of the one parameter, or number; empty: the whole layer."""

    pattern: str = ""
    """Entry of the plan that names it."""


def check_plan(plan: object, size: int) -> TensorPlan | None:
    """Check and return a plan as the user gives it."""
    if plan is None:
        return None
    if plan != "auto" and not isinstance(plan, Mapping):
        raise ConfigurationError(
            f"tensor_parallel_plan: expected 'auto' or a mapping of names of modules to styles, "
            f"found {plan!r}"
        )
    for pattern, style in cast("Mapping[Any, Any]", {} if plan == "auto" else plan).items():
        if not isinstance(pattern, str):
            raise ConfigurationError(
                f"tensor_parallel_plan: expected names of modules as keys, found {pattern!r}"
            )
        _styles_of(pattern, style)
    if size == 1 and plan != "auto":
        raise ConfigurationError(
            "tensor_parallel_plan needs tensor_parallel_size=2 or more: one rank splits nothing"
        )
    return cast("TensorPlan", plan)


def find_layers(root: nn.Module, plan: TensorPlan, size: int) -> list[PlannedLayer]:
    """Return the layers that a plan splits, without a change to the model.

    Args:
        root: The LightningModule.
        plan: Styles by pattern, relative to ``root``. ``*`` stands for one part of a name, ``**``
            for any number of them. ``auto``: the plans of models of transformers.
        size: Number of ranks that split a layer.

    Raises:
        ConfigurationError: A pattern or a style is unknown, a layer cannot be split in its style,
            or it has heads that ``size`` does not divide.
    """
    refuse_split(root)
    strict = plan != "auto"
    entries = plan if strict else _plans_of_models(root)
    modules = dict(root.named_modules(remove_duplicate=False))
    parameters = dict(root.named_parameters(remove_duplicate=False))
    numbers = {
        join(name, attribute): value
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if type(value) is int
    }
    found: list[PlannedLayer] = []
    for pattern, styles in cast("Mapping[str, Any]", entries).items():
        of_numbers = styles in (DIVIDE, KEEP, [DIVIDE], [KEEP])
        known = numbers if of_numbers else [*modules, *parameters]
        names = _matching(pattern, [*known], strict)
        for name in names:
            for style_name, style in _styles_of(pattern, styles):
                owner, _, attribute = name.rpartition(".")
                is_layer = name in modules
                layer = PlannedLayer(
                    name=name,
                    style_name=style_name,
                    style=style,
                    module=modules[name if is_layer else owner],
                    parameter="" if is_layer else attribute,
                    pattern=pattern,
                )
                _check_layer(layer)
                if of_numbers and numbers[name] % size and styles in (DIVIDE, [DIVIDE]):
                    raise ConfigurationError(
                        f"tensor_parallel_plan is to divide {name!r}, which is {numbers[name]}, by "
                        f"tensor_parallel_size={size}, which does not divide it"
                    )
                found.append(layer)
    _check_undivided(found)
    if not strict:
        found = [*map(partial(_whole_if_uneven, size), found)]
    found = _without_repeated(_without_shared(root, found, strict), strict)
    _check_heads(root, found, size, strict)
    if strict:
        _check_fused(found)
    _check_inside_of_gathered(found)
    return found


def with_own_forward(layers: Iterable[PlannedLayer]) -> list[str]:
    """Return names of split layers with a forward other than torch's, which may need all of it."""
    kinds = (nn.Linear, nn.Embedding)
    return [
        it.name
        for it in layers
        if isinstance(it.style, ParallelStyle)
        and it.style.splits is not None
        and not it.parameter
        and all(type(it.module).forward is not kind.forward for kind in kinds)
        and type(it.module).__name__ != "Conv1D"  # of transformers: as nn.Linear
    ]


def with_heads_of_configs(root: nn.Module, layers: Iterable[PlannedLayer]) -> list[str]:
    """Return numbers of heads in configurations, by which forwards may view features of a rank.

    Numbers of modules have entries in the plan; one of a configuration cannot be divided.
    """
    found: dict[str, None] = {}
    for layer in layers:
        path, _, attribute = layer.name.rpartition(".")
        style = layer.style
        is_cut = isinstance(style, ParallelStyle) and style.splits == "columns" and not style.after
        if not is_cut or layer.parameter or not _PROJECTIONS.fullmatch(attribute):
            continue
        held = vars(root.get_submodule(path))
        if not _WIDTHS.isdisjoint(held) or any(type(held.get(it)) is int for it in _COUNTS):
            continue
        for name, value in held.items():
            if not name.startswith("_") and not isinstance(value, (nn.Module, int, float, str)):
                counts = [it for it in _COUNTS if type(getattr(value, it, None)) is int]
                found |= {join(path, f"{name}.{it}"): None for it in counts[:1]}
    return [*found]


def parameters_to_cut(layers: Iterable[PlannedLayer]) -> Iterator[nn.Parameter]:
    """Yield the parameters that are going to be split or wrapped."""
    for layer in layers:
        if isinstance(layer.style, ParallelStyle):
            yield from (it for _, it in _own_parameters(layer, layers))


def cut_layers(
    root: nn.Module, layers: Sequence[PlannedLayer], axis: TensorAxis
) -> dict[nn.Parameter, Distribution]:
    """Cut the parameters of layers, and set hooks for the exchanges of their styles.

    Layers in styles of torch are left out. Returns the split of each former parameter, by new
    parameter.
    """
    made: dict[int, tuple[nn.Parameter, Distribution]] = {}
    gathered = [it.module for it in layers if it.style_name == "gather_sequence"]
    inside = {id(child) for module in gathered for child in module.modules()}
    parents = {id(child): parent for parent in root.modules() for child in parent.children()}
    siblings: dict[int, Siblings] = {}

    def called(module: nn.Module) -> nn.Module:
        """Return a module, or the first one around it that has a forward: a list has none."""
        while module is not root and not has_forward(module):
            module = parents.get(id(module), root)
        return module

    for layer in layers:
        style, sizes = layer.style, linear_sizes(layer.module)
        if isinstance(style, TorchStyle):
            continue
        for name, parameter in _own_parameters(layer, layers):
            distribution = distribution_of(name, layer.module, parameter, style, axis)
            if distribution is not None and id(parameter) not in made:
                module = called(layer.module)
                distribution = replace(distribution, layer=None if module is root else module)
                local = local_part(parameter, distribution, axis.rank)
                made[id(parameter)] = local, distribution
        if layer.style_name == DIVIDE:
            setattr(
                layer.module, layer.parameter, getattr(layer.module, layer.parameter) // axis.size
            )
            refusal = DividedCount(layer.module, layer.name)
            layer.module.register_forward_pre_hook(refusal.refuse_copy)
        if layer.parameter:
            continue
        parent = parents.get(id(layer.module), root)
        around = called(parent)
        if around is not root and id(around) not in siblings:
            siblings[id(around)] = Siblings()
            forget_inputs_after(around, siblings[id(around)])
        # A training step calls layers of the root without calling the root's forward.
        know = SplitLayerState(
            module=layer.module, axis=axis, siblings=siblings.get(id(around)), name=layer.name
        )
        if style.splits == "vocabulary":
            _prepare_rows(know)
        if style.splits == "rows" and sizes is not None:
            know.num_features = sizes.inputs // axis.size
        if style.splits == "columns" and sizes is not None and sizes.is_transposed:
            know.num_columns = sizes.outputs // axis.size
            know.attributes = {"nf": know.num_columns}  # it makes its output's shape of this
        if style.after == "gather_features":
            outputs = layer.module.embedding_dim if sizes is None else sizes.outputs
            know.num_outputs = cast("int", outputs) // axis.size
        if style.after == "sum_gradient_of_rope":
            know.rope_dim = _rope_dim(layer, parent, root)
        know.install(style, sums_input=id(layer.module) not in inside)
    return replace_parameters(root, made)


# -- Patterns and styles


def _styles_of(pattern: str, styles: Any) -> list[tuple[str, ParallelStyle | TorchStyle]]:
    if isinstance(styles, TorchStyle):
        return [(type(styles).__name__, styles)]
    names: Any = [styles] if isinstance(styles, str) else styles
    if not isinstance(names, (list, tuple)) or not names:
        raise ConfigurationError(
            f"tensor_parallel_plan: expected the name of a style for {pattern!r}, several of them, "
            f"or a ParallelStyle of torch, found {styles!r}"
        )
    found: list[tuple[str, ParallelStyle | TorchStyle]] = []
    for name in cast("Sequence[Any]", names):
        known = ALIASES.get(name, name) if isinstance(name, str) else name
        fused = re.fullmatch(r"(packed_\w+):([1-9]\d?)", str(known))
        if fused and fused[1] in STYLES:
            found.append((str(known), replace(STYLES[fused[1]], fused=int(fused[2]))))
            continue
        if not isinstance(known, str) or known not in STYLES:
            raise ConfigurationError(
                f"tensor_parallel_plan: expected a style for {pattern!r}, found {name!r}; "
                f"{nearest(str(name), STYLES)}"
            )
        found.append((known, STYLES[known]))
    if len(found) > 1 and {DIVIDE, KEEP} & {name for name, _ in found}:
        raise ConfigurationError(
            f"tensor_parallel_plan: expected 'divide' or 'keep' alone, for the name of a number, "
            f"found {styles!r} for {pattern!r}"
        )
    if len(dict(found)) < len(found) or sum(bool(it.splits) for _, it in found) > 1:  # type: ignore[union-attr]
        raise ConfigurationError(
            f"tensor_parallel_plan: expected styles for {pattern!r} of which each occurs once and "
            f"at most one splits the layer, found {styles!r}"
        )
    return found


def _matching(pattern: str, names: Sequence[str], strict: bool) -> list[str]:
    parts = re.split(r"(\*\*|\*)", pattern)
    text = "".join({"*": r"[^.]+", "**": r".+"}.get(it) or re.escape(it) for it in parts)
    matches = [name for name in dict.fromkeys(names) if name and re.fullmatch(text, name)]
    if not matches and strict:
        known = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names if name}
        raise ConfigurationError(
            f"tensor_parallel_plan: expected names of modules or parameters of the LightningModule, "
            f"found {pattern!r}, which is none; {nearest(pattern, sorted(known))} Names are those "
            f"of named_modules(); * stands for one part of a name, ** for any number"
        )
    return matches


def _plans_of_models(root: nn.Module) -> dict[str, str]:
    """Return the plans of models of transformers, with names relative to the root."""
    entries: dict[str, str] = {}
    outermost: list[str] = []
    others: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(f"{it}.") or it == "" for it in outermost):
            continue
        plan = getattr(module, "tp_plan", None)
        if not isinstance(plan, Mapping):
            continue
        plan = cast("Mapping[str, str]", plan)
        if not any("*" in pattern for pattern in plan) and _is_base_model(module):
            plan = _PLANS.get(str(getattr(module.config, "model_type", "")), {})
        if not any("*" in pattern for pattern in plan):
            others.append(type(module).__name__)
            continue
        outermost.append(name)
        entries |= {join(name, pattern): style for pattern, style in plan.items()}
    if not entries:
        found = f"{first_three(sorted(set(others)))}, without one" if others else "no such model"
        raise ConfigurationError(
            f"tensor_parallel_plan='auto' takes the plan that models of transformers have "
            f"(base_model_tp_plan of their config), found {found}. Write a mapping of names to "
            f"styles, such as {{'model.layers.*.mlp.up_proj': 'colwise'}}"
        )
    return entries


def _is_base_model(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers without a head."""
    return getattr(module, "base_model", None) is module


_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise:3",
        "h.*.crossattention.c_attn": "packed_colwise:2",
        "h.*.crossattention.q_attn": "colwise",
        "h.*.*.num_heads": DIVIDE,
        "h.*.*.split_size": DIVIDE,
        "h.*.*.c_fc": "colwise",
        "h.*.*.c_proj": "rowwise",
    },
}
"""Plans for models without one in transformers, by ``model_type``, relative to the base model."""


# -- Checks


def _own_parameters(
    layer: PlannedLayer, layers: Iterable[PlannedLayer]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a layer's style cuts or wraps: those without their own entry."""
    if layer.parameter:
        parameter = layer.module._parameters.get(layer.parameter)
        if parameter is not None:
            yield layer.name, parameter
        return
    named = {it.parameter for it in layers if it.module is layer.module}
    for attribute, parameter in layer.module._parameters.items():
        if parameter is not None and attribute not in named:
            yield join(layer.name, attribute), parameter


UNEVEN = "replicate, uneven"
"""Style of a layer that ``auto`` leaves whole, because the ranks do not divide it."""

_SELF_CONTAINED = {
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "embedding_colwise",
}
"""Styles with whole inputs and outputs: other layers do not depend on the split."""


def _whole_if_uneven(size: int, layer: PlannedLayer) -> PlannedLayer:
    """Return a layer of a model's own plan, whole if possible where the ranks do not divide it.

    Vocabularies grow by a token or two when a model is fine-tuned.
    """
    weight = layer.module._parameters.get("weight")
    if layer.style_name not in _SELF_CONTAINED or layer.parameter or weight is None:
        return layer
    by_output = layer.style_name in ("colwise_gather_output", "embedding_rowwise")
    sizes = linear_sizes(layer.module)
    transposed = sizes is not None and sizes.is_transposed
    if weight.shape[0 if by_output is not transposed else 1] % size == 0:
        return layer
    return replace(layer, style=STYLES["replicate"], style_name=UNEVEN)


def _check_undivided(layers: Sequence[PlannedLayer]) -> None:
    for layer in layers:
        for name, parameter in _own_parameters(layer, layers):
            if isinstance(parameter, DTensor):
                raise ConfigurationError(
                    f"{name!r} is a DTensor that parallelize_module has made, and "
                    f"tensor_parallel_plan names it as well: take one of the two out"
                )


def _check_layer(layer: PlannedLayer) -> None:
    """Raise if a style cannot split its layer."""
    style, module = layer.style, layer.module
    attention = isinstance(module, (nn.MultiheadAttention, NonDynamicallyQuantizableLinear))
    if attention and (style.splits if isinstance(style, ParallelStyle) else True):
        raise ConfigurationError(
            f"{layer.name!r} belongs to an nn.MultiheadAttention, which computes with all heads and "
            f"does not call its output layer: ranks cannot split it. Leave it out of "
            f"tensor_parallel_plan, or build the attention of nn.Linear layers"
        )
    if isinstance(style, TorchStyle) or layer.parameter:
        return
    kind = type(module).__name__
    linear = style.splits in ("columns", "rows")
    if linear and "weight" not in module._parameters and hasattr(module, "weight"):
        raise ConfigurationError(
            f"expected layers with a parameter 'weight' for style {layer.style_name!r}, found "
            f"{layer.name!r}, whose weight is computed of other parameters (weight_norm, "
            f"spectral_norm, pruning): ranks cannot split it. Remove this from the layer, or write "
            f"a tensor_parallel_plan without it, a mapping of names to styles"
        )
    if linear and linear_sizes(module) is None:
        raise ConfigurationError(
            f"expected linear layers with a weight of (out_features, in_features) for style "
            f"{layer.style_name!r}, found {layer.name!r}, a {kind}. Leave it out of "
            f"tensor_parallel_plan, or build the model with nn.Linear there"
        )
    if style.splits in ("vocabulary", "features"):
        odd = [it for it in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, it, 0)]
        if not isinstance(module, nn.Embedding) or odd:
            raise ConfigurationError(
                f"expected an nn.Embedding without max_norm, scale_grad_by_freq and sparse for "
                f"style {layer.style_name!r}, found {layer.name!r}, a {kind}"
                f"{f' with {odd[0]}' if odd else ''}. Leave it out of tensor_parallel_plan"
            )


def _without_shared(
    root: nn.Module, layers: Sequence[PlannedLayer], strict: bool
) -> list[PlannedLayer]:
    """Return the layers, except those with parameters that others use whole or cut differently.

    In the user's own plan (``strict``), such layers are an error.
    """
    # Without further names of a module that has several.
    places: dict[object, dict[str, int]] = {}
    for path, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(memory_of(parameter), {})[join(path, attribute)] = id(parameter)
    names = {id(module): path for path, module in root.named_modules()}
    kept = list(layers)
    while True:
        splits: dict[object, dict[str, object]] = {}
        for layer in kept:
            if isinstance(layer.style, ParallelStyle):
                dim = {"columns": 0, "vocabulary": 0, None: None}.get(layer.style.splits, 1)
                sizes = linear_sizes(layer.module)
                if dim is not None and sizes is not None and sizes.is_transposed:
                    dim = 1 - dim
                for name, parameter in _own_parameters(layer, kept):
                    if dim is not None:
                        name = join(names[id(layer.module)], name.rpartition(".")[2])
                        ways = splits.setdefault(memory_of(parameter), {})
                        ways[name] = dim, layer.style.fused
        odd = {
            key
            for key, ways in splits.items()
            if len(set(ways.values())) > 1
            or ways.keys() != places[key].keys()
            or len({*places[key].values()}) > 1
        }
        if not odd:
            return kept
        if strict:
            key = min(odd, key=lambda it: [*places[it]])
            refuse_several(places[key])
            raise ConfigurationError(
                f"{' and '.join(places[key])} are one parameter, and tensor_parallel_plan does not "
                f"split it in one way at all of them: name all of them with styles that split the "
                f"same dim ('embedding_rowwise' and 'colwise_gather_output'), or none"
            )
        kept = [
            layer
            for layer in kept
            if not any(memory_of(it) in odd for _, it in _own_parameters(layer, kept))
        ]


def refuse_several(places: Mapping[str, int]) -> None:
    """Raise if places with one memory have several parameters, of which parts would not share it.

    Args:
        places: Identity of the parameter at each.
    """
    if len({*places.values()}) > 1:
        first, *others = places
        raise ConfigurationError(
            f"{' and '.join(places)} are several parameters with the same memory, and "
            f"tensor_parallel_plan splits it: they would be trained apart. Expected one parameter: "
            f"{others[0]} = {first} in the model, and not .data"
        )


def _without_repeated(layers: Sequence[PlannedLayer], strict: bool) -> list[PlannedLayer]:
    """Return the layers, each once, even if it is registered several times.

    If several entries of the user's own plan (``strict``) name one layer, it is unknown which one
    is meant, and both would be applied: an error.
    """
    kept: dict[tuple[int, str, str], PlannedLayer] = {}
    named: dict[tuple[int, str], dict[tuple[str, str], set[str]]] = {}
    for layer in layers:
        entries = named.setdefault((id(layer.module), layer.parameter), {})
        entries.setdefault((layer.name, layer.pattern), set()).add(layer.style_name)
        kept.setdefault((id(layer.module), layer.parameter, layer.style_name), layer)
    for entries in named.values() if strict else ():
        names = [name for name, _ in entries]
        first, *others = entries.values()
        if len({*names}) < len(names) or any(it != first for it in others):
            said = " and ".join(
                f"{pattern!r} ({', '.join(it)})" for (_, pattern), it in entries.items()
            )
            raise ConfigurationError(
                f"tensor_parallel_plan names {names[0]!r} by {said}: expected one entry for a "
                f"layer, with a list of styles if it has several"
            )
    return list(kept.values())


def _check_fused(layers: Sequence[PlannedLayer]) -> None:
    """Refuse a style that splits several layers in one weight as if they were one.

    A module that splits a layer by rows computes its input from layers of as many columns. A layer
    of two or three times as many is probably several in one weight (gate and up; q, k, v): a rank
    would have other features than its forward takes them for.
    """
    inputs: dict[str, set[int]] = {}  # input features of layers split by rows, by parent module
    outputs: dict[str, set[float]] = {}  # output features of each layer split by columns
    split = [
        (layer, layer.style)
        for layer in layers
        if isinstance(layer.style, ParallelStyle) and not layer.parameter
    ]
    for layer, style in split:
        sizes = linear_sizes(layer.module)
        if style.splits == "rows" and sizes is not None:
            features = sizes.inputs // style.fused
            inputs.setdefault(layer.name.rpartition(".")[0], set()).add(features)
        if style.splits == "columns" and sizes is not None:
            outputs.setdefault(layer.name.rpartition(".")[0], set()).add(
                sizes.outputs / style.fused
            )
    for layer, style in split:
        around, _, attribute = layer.name.rpartition(".")
        taken = sorted(inputs.get(around, ()))
        if style.splits != "columns" or style.after or not taken or layer.style_name.endswith(":1"):
            continue
        sizes = linear_sizes(layer.module)
        features = 0 if sizes is None else sizes.outputs
        if style.fused > 1 and features in taken and features not in outputs[around]:
            raise ConfigurationError(
                f"{layer.name!r} has {features} output features, as many as a layer split by rows "
                f"beside it takes: it seems to be one layer, and style {layer.style_name!r} would "
                f"give ranks other features than that layer takes. In tensor_parallel_plan write "
                f"'colwise', or 'packed_rowwise:{style.fused}' for that layer"
            )
        piles = [features / style.fused / it for it in taken]
        if attribute in _PILES:  # keys and values of fewer heads than queries are no third of it
            odd = style.fused > 1 or max(piles) > 1
        else:
            odd = style.fused == 1 and any(it > 1 and it.is_integer() for it in piles)
        if odd and 1 not in piles:
            raise ConfigurationError(
                f"{layer.name!r} has {features} output features, and layers split by rows beside it "
                f"take {first_three(map(str, taken))}: it seems to be several layers in one weight, "
                f"and style {layer.style_name!r} would give ranks a wrong part of each. In "
                f"tensor_parallel_plan write 'packed_colwise:n' for n equal layers, one behind the "
                f"other, and 'packed_colwise:1' for one layer, or heads one by one. Make layers of "
                f"different sizes (fewer key-value heads) layers of their own"
            )


_PILES = ("qkv", "qkv_proj", "query_key_value")

_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)
"""Attributes with which models view features as heads."""

_WIDTHS = {"head_dim", "head_size", "attention_head_size", "dim_head", "d_head"}
"""Attributes with which models view features as heads of a width: each rank has some of them."""

_PROJECTIONS = re.compile(r"(q|k|v|qkv|query|key|value|query_key_value|q_b|kv_b)(_proj)?")


def _check_heads(root: nn.Module, layers: Sequence[PlannedLayer], size: int, strict: bool) -> None:
    """Check that ranks get whole attention heads: a view of features as heads would mix them."""
    named = {layer.name for layer in layers}
    for layer in layers:
        style = layer.style
        if isinstance(style, TorchStyle) or style.splits != "columns" or style.after:
            continue
        path, _, attribute = layer.name.rpartition(".")
        held = vars(root.get_submodule(path))
        for count in (
            it for it in (*_COUNTS, "split_size") if strict and type(held.get(it)) is int
        ):
            if join(path, count) not in named:
                pattern = re.sub(r"\.\d+(?=\.|$)", ".*", join(path, count))
                raise ConfigurationError(
                    f"{path!r} has {count}={held[count]}, by which its forward may divide "
                    f"the features of {attribute!r}, and a rank has 1/{size} of them: add "
                    f"{pattern!r}: 'divide' to tensor_parallel_plan if it does, 'keep' if it does "
                    f"not"
                )
        if not _PROJECTIONS.fullmatch(attribute) or linear_sizes(layer.module) is None:
            continue
        around = root.get_submodule(path)
        config = getattr(around, "config", None)
        features = layer.module._parameters["weight"].shape[0] // style.fused  # type: ignore[union-attr]
        head_dim = getattr(around, "head_dim", None)
        counts: list[int] = []
        if isinstance(head_dim, int) and features % head_dim == 0:
            counts.append(features // head_dim)
        else:
            kind = ("k", "v", "key", "value")
            names = [*_COUNTS[:6]]
            if attribute.removesuffix("_proj") in kind:
                names = [*_COUNTS[6:], *names]
            found = [getattr(it, name, None) for it in (around, config) for name in names]
            counts += [it for it in found if isinstance(it, int)][:1]
        for count in counts:
            if count % size:
                fits = [it for it in range(1, count + 1) if count % it == 0]
                raise ConfigurationError(
                    f"{layer.name!r} has {count} attention heads, which tensor_parallel_size="
                    f"{size} does not divide: use one of {fits}, or leave the attention of "
                    f"{path!r} out of tensor_parallel_plan"
                )


def _check_inside_of_gathered(layers: Sequence[PlannedLayer]) -> None:
    """Check that every parameter inside of ``gather_sequence`` has a style for its gradient."""
    planned = {id(it) for layer in layers for _, it in _own_parameters(layer, layers)}
    for layer in layers:
        if layer.style_name != "gather_sequence":
            continue
        for name, parameter in layer.module.named_parameters():
            if id(parameter) not in planned:
                raise ConfigurationError(
                    f"the style of {layer.name!r} is 'gather_sequence', and its parameter {name!r} "
                    f"is in no entry of tensor_parallel_plan: ranks would have parts of its "
                    f"gradient. Split it, or give it 'replicated_with_grad_allreduce'"
                )


def _prepare_rows(know: SplitLayerState) -> None:
    embedding = cast("nn.Embedding", know.module)
    rows = know.num_rows = embedding.num_embeddings // know.axis.size
    if embedding.padding_idx is not None:
        # The kernel compares it with local indices.
        local = embedding.padding_idx - know.axis.rank * rows
        know.attributes = {"padding_idx": local if 0 <= local < rows else None}


def _rope_dim(layer: PlannedLayer, parent: nn.Module, root: nn.Module) -> int:
    for holder in (parent, getattr(parent, "config", None), *root.modules()):
        found = getattr(holder, "qk_rope_head_dim", None)
        if isinstance(found, int):
            return found
    raise ConfigurationError(
        f"style {layer.style_name!r} needs qk_rope_head_dim of the module around {layer.name!r}, "
        f"or of its config; found none"
    )
