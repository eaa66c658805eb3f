"""Tensor parallelism under Lightning: split layers, and checks that their ranks compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import extract_tb
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.modules.module import register_module_parameter_registration_hook
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from shardeddp.comm import Mesh
from shardeddp.comm.activations import name_group
from shardeddp.comm.consistency import checksum
from shardeddp.comm.run_state import describe
from shardeddp.engine.hooks import find_tensors
from shardeddp.engine.runtime import Runtime
from shardeddp.errors import ConfigurationError, extend_message, first_three
from shardeddp.lightning.api import rank_zero_warn
from shardeddp.lightning.axes import DATA_PARALLEL
from shardeddp.tensor.module_hooks import state_of
from shardeddp.tensor.parallel_styles import SplitLayerState, TensorAxis
from shardeddp.tensor.shard_tensor import ShardTensor, local_or_whole
from shardeddp.wrap.tensor_plan import PlannedLayer, refuse_several
from shardeddp.wrap.tree import join, memory_of


def tensor_axis(mesh: Mesh) -> TensorAxis:
    """Return the tensor-parallel group for the styles of a plan."""
    return TensorAxis(name_group(mesh.activations), mesh.tensor.rank, mesh.tensor.size)


def parallelize(root: nn.Module, layers: Sequence[PlannedLayer], mesh: DeviceMesh) -> None:
    """Split the layers of a plan with torch styles, which create DTensors; tied ones stay tied.

    Raises:
        ConfigurationError: Layers with one parameter are split in different ways, or several
            parameters have one memory.
    """
    styled = [(it.module, it.style) for it in layers if isinstance(it.style, ParallelStyle)]
    with _watched_splits(root) as split:
        for module, style in styled:
            parallelize_module(module, mesh, style)
    for places in split:
        refuse_several({it.name: it.former for it in places})
        if len({_placements(it.parameter) for it in places}) > 1:
            raise ConfigurationError(
                f"{_names(places)} are one parameter, and the styles of tensor_parallel_plan split it "
                f"in different ways: expected the same dim, as by RowwiseParallel for an embedding and "
                f"ColwiseParallel for the head, or neither of them in the plan"
            )
        for it in places:
            it.module._parameters[it.key] = places[0].parameter


@contextmanager
def warning_of_untied(root: nn.Module | None) -> Generator[None]:
    """Warn of tied parameters that code inside has split, each for itself."""
    if root is None:
        yield
        return
    with _watched_splits(root) as split:
        yield
    for places in split:
        rank_zero_warn(
            f"{_names(places)} were one parameter, and are several since configure_model has split "
            f"them: they are trained apart. Tie them again behind parallelize_module "
            f"(self.head.weight = self.embed.weight), if they are split over the same dim"
        )


class _Place(NamedTuple):
    module: nn.Module
    key: str
    name: str
    former: int
    """Identity of the parameter before a split."""

    @property
    def parameter(self) -> nn.Parameter | None:
        """Present parameter at this place."""
        return self.module._parameters.get(self.key)


@contextmanager
def _watched_splits(root: nn.Module) -> Generator[list[list[_Place]]]:
    """Yield a list that gets, at the end, the places of each memory that code inside has untied.

    These have had one memory, which was split at one of them or more, and do not have one parameter
    now. Registrations are watched, as the model may be built inside, and memory is compared without
    keeping it: whole parameters are freed one by one.
    """
    found: list[list[_Place]] = []
    # By identities of modules, and names; with the modules, so that these identities stay theirs.
    split: dict[tuple[int, str], tuple[nn.Module, int, object]] = {}

    def watch(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        former = module._parameters.get(name)
        if isinstance(parameter, DTensor) and not isinstance(former, DTensor | None):
            split[id(module), name] = module, id(former), memory_of(former)

    hook = register_module_parameter_registration_hook(watch)
    try:
        yield found
    finally:
        hook.remove()
    memories = {memory: list[_Place]() for _, _, memory in split.values()}
    for path, module in root.named_modules() if split else ():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            whole = id(parameter), memory_of(parameter)
            _, former, memory = split.get((id(module), key), (module, *whole))
            if memory in memories:
                memories[memory].append(_Place(module, key, join(path, key), former))
    found += (it for it in memories.values() if len({id(at.parameter) for at in it}) > 1)


def _names(places: Iterable[_Place]) -> str:
    return " and ".join(it.name for it in places)


def _placements(parameter: torch.Tensor | None) -> object:
    """Return how a parameter is split; None: it is whole on each rank."""
    return parameter.placements if isinstance(parameter, DTensor) else None


_SHAPES = (
    "shapes cannot be multiplied",
    "must match the size of tensor",
    "normalized_shape",
    "is invalid for input of size",
    "out of bounds",
    "expand",
)
"""Parts of torch's messages on mismatched shapes."""


def explain_shapes(error: BaseException, size: int) -> None:
    """Append a hint on split layers to an error about shapes; ignore other errors."""
    if size == 1 or not isinstance(error, RuntimeError | IndexError | ValueError):
        return
    text = str(error)
    if "tensor_parallel_" in text or not any(it in text for it in _SHAPES):
        return
    extend_message(
        error,
        f"With tensor_parallel_size={size}, what comes out of a 'colwise' layer is "
        f"this rank's 1/{size} of its features. Behind it has to be a 'rowwise' layer and "
        f"nothing that needs all features (a norm, a parameter of their size); or leave the "
        f"layer out of tensor_parallel_plan, or give it 'colwise_gather_output' if all ranks compute "
        f"the same behind it (attention with heads of each rank does not).",
    )


class TensorRankChecks:
    """Checks that ranks which split layers compute the same, in a step or backward of a run.

    The checks are collectives of these ranks. They run in the events 1, 2, 4, 8, ... of each kind:
    at no cost in the long run.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._observed: list[SplitLayerState] = []  # layers with whole outputs, before a comparison

    def begin_run(self, mesh: Mesh) -> None:
        """Begin the counts of a training anew; forget what a failed one has observed."""
        self._counts.clear()
        self._end_observation()
        mesh.run.end_observation()

    def begin_evaluation(self) -> None:
        """Begin the counts of evaluations anew."""
        for name in ("validation_step", "test_step", "predict_step"):
            del self._counts[name]

    def begin_step(self, name: str, inputs: object, runtime: Runtime) -> None:
        """Compare the batches of a step, and have gradients of its outputs observed."""
        mesh = runtime.mesh
        if mesh.topology.tensor_size == 1:
            return
        mesh.run.begin_step()
        self._counts[name] += 1
        if self._is_due(name):
            _compare_batches(name, inputs, mesh)
        if name == "training_step" and self._is_due("backward", 1):
            states = map(state_of, runtime.root_module.modules())
            self._observed = [
                it for it in states if isinstance(it, SplitLayerState) and it.has_whole_output
            ]
            for layer in self._observed:
                layer.observe_output(mesh.run.observe)

    def _end_observation(self) -> list[str]:
        """Return the names of the layers whose outputs were observed."""
        observed, self._observed = self._observed, []
        for layer in observed:
            layer.observe_output(None)
        return [layer.name for layer in observed]

    def begin_backward(self, loss: torch.Tensor, mesh: Mesh) -> None:
        """Compare the losses of a backward, and have its gradients observed."""
        if mesh.topology.tensor_size > 1 and self._is_due("backward", 1):
            _compare_losses(loss, mesh)
            mesh.run.begin_observation()

    def end_backward(self, runtime: Runtime) -> None:
        """Compare the gradients of a backward if it has reduced them."""
        mesh = runtime.mesh
        if mesh.topology.tensor_size == 1 or not runtime.sync_gradients:
            return
        self._counts["backward"] += 1
        observed = mesh.run.end_observation()
        whole = {name: it for name, it in observed.items() if name not in mesh.run.cut}
        if self._is_due("backward"):
            _compare_gradients(runtime.root_module.parameters(), whole, mesh)
            _compare_outputs(self._end_observation(), observed, mesh)

    def _is_due(self, kind: str, ahead: int = 0) -> bool:
        return (self._counts[kind] + ahead).bit_count() == 1


def _compare_batches(step: str, inputs: object, mesh: Mesh) -> None:
    """Check that tensors of a batch are equal in the tensor-parallel group."""
    described = torch.zeros(2, dtype=torch.int64, device=mesh.device)
    for tensor in find_tensors(inputs):
        if tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested):
            values = tensor.detach().resolve_conj().resolve_neg().to(mesh.device)
            found = checksum(values)
            described = described * 31 + torch.stack([found, found.new_tensor(1 + values.numel())])
    greatest, least = _extremes(described, mesh)
    if not torch.equal(greatest, least):
        raise RuntimeError(
            f"tensor_parallel_size={mesh.tensor.size}: expected one batch on all ranks that split "
            f"layers, found different ones in {step}. These ranks compute one forward together. Give "
            f"a sampler strategy.distributed_sampler_kwargs, divide an iterable dataset by its rank "
            f"and num_replicas as well, and seed random augmentations alike (seed_everything). Tensors of a "
            f"batch are compared, numbers and strings are not: what may differ (a time) is no tensor"
        )


def _compare_losses(loss: torch.Tensor, mesh: Mesh) -> None:
    """Check that the loss is equal in the tensor-parallel group; a collective of the group.

    Raises:
        RuntimeError: Losses differ by more than 0.01 %: ranks have different random numbers, or use
            a part of the features as if it were all of them.
    """
    if isinstance(loss, DTensor):
        return
    greatest, least = (it.item() for it in _extremes(loss.detach().double().sum().float(), mesh))
    if greatest - least > 1e-4 * max(abs(greatest), abs(least)):
        raise RuntimeError(
            f"expected one loss on the {mesh.tensor.size} ranks that split layers, found {least:g} to "
            f"{greatest:g}: either they have different random numbers (seed_everything), or "
            f"tensor_parallel_plan leaves each with a part of features that is taken for all of them: a "
            f"'colwise' layer without a 'rowwise' one behind it ('colwise_gather_output' has all)"
        )


def _compare_gradients(
    parameters: Iterable[torch.Tensor], observed: Mapping[str, torch.Tensor], mesh: Mesh
) -> None:
    """Check that whole parameters have equal gradients in the tensor-parallel group; a collective.

    Each rank steps on a copy of them, so that different gradients make different models. So do
    uses of a split parameter outside of its layer. Compared are norms and projections on one
    vector, two numbers for each parameter.

    Raises:
        RuntimeError: Gradients of a parameter differ by more than 1 %.
    """
    nothing = torch.zeros(2, device=mesh.device)
    gradients = {
        it.spec.fqn: observed.get(it.spec.fqn, nothing)
        if it.spec.boxes
        else _described(it.grad, mesh.device)
        for it in parameters
        if isinstance(it, ShardTensor) and it.requires_grad
    }
    if names := _differing(gradients, mesh):
        raise RuntimeError(
            f"expected equal gradients on the {mesh.tensor.size} ranks that split layers, found different "
            f"ones of {first_three(names)}, which every rank uses whole: each would train a copy of its "
            f"own. It is used where a rank has a part of the features (between 'colwise' and 'rowwise') "
            f"or of the sequence (a norm there needs the style 'sequence_parallel'), or ranks have "
            f"different random numbers. Move it to another place, give its module a style, or leave the "
            f"layers around it out of tensor_parallel_plan"
        )


def _compare_outputs(
    layers: Iterable[str], observed: Mapping[str, torch.Tensor], mesh: Mesh
) -> None:
    """Check that gradients of whole outputs are equal in the tensor-parallel group; a collective.

    Raises:
        RuntimeError: They differ by more than 1 %: a rank's backward goes on with its own alone.
    """
    nothing = torch.zeros(2, device=mesh.device)
    if names := _differing({name: observed.get(name, nothing) for name in layers}, mesh):
        raise RuntimeError(
            f"expected equal gradients on the {mesh.tensor.size} ranks that split layers, found different "
            f"ones of what {first_three(names)} return, which every rank has whole: code behind it "
            f"computes with a part of its own (attention with a rank's heads, one key for all of them), "
            f"and the gradient of the others' parts is lost. Leave these layers and those beside them "
            f"out of tensor_parallel_plan"
        )


def _differing(gradients: Mapping[str, torch.Tensor], mesh: Mesh) -> list[str]:
    """Return names of gradients, described, that differ in the tensor-parallel group by over 1 %."""
    if not gradients:
        return []
    greatest, least = _extremes(torch.stack([*gradients.values()]), mesh)
    differ = (greatest - least).amax(1) > 1e-2 * greatest[:, 0]  # of the norm
    return [name for name, bad in zip(gradients, differ.tolist(), strict=True) if bad]


def _extremes(values: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return element-wise maximum and minimum over the tensor-parallel group, by one all-reduce."""
    both = torch.stack([values, -values])
    mesh.tensor.all_reduce_(both, "max").wait()
    return both[0], -both[1]


def _described(gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    local = local_or_whole(gradient)
    return torch.zeros(2, device=device) if local is None else describe(local).to(device)


_DATA_GROUPS: list[ProcessGroup] = []
"""Groups of this process that metrics use, each once; runs on equal meshes use one group.

None is ever removed, as a metric of an earlier run may still be computed with its index.
"""


@dataclass(frozen=True)
class GatherOverData:
    """Gather of metric states over ranks with different batches; a metric's ``dist_sync_fn``."""

    number: int
    """Index of the process group in ``_DATA_GROUPS``; copies of a metric cannot hold the group."""

    def __call__(self, state: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        """Gather the states of all ranks."""
        return gather_all_tensors(state, _DATA_GROUPS[self.number])


def count_batches_once(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let metrics synchronize only over ranks with different batches."""
    group = mesh[DATA_PARALLEL].get_group()
    if group not in _DATA_GROUPS:
        _DATA_GROUPS.append(group)
    gather = GatherOverData(_DATA_GROUPS.index(group))
    for child in module.modules():
        if isinstance(child, Metric) and (
            child.dist_sync_fn is None or isinstance(child.dist_sync_fn, GatherOverData)
        ):
            child.dist_sync_fn = gather


def explain_missing_mesh(error: TypeError) -> None:
    """Raise an error with advice if ``configure_model`` used a ``device_mesh`` that is missing."""
    if "device_mesh" in (extract_tb(error.__traceback__)[-1].line or ""):
        raise ConfigurationError(
            "configure_model asks for a device_mesh, and there is none without a tensor axis. "
            "Take fully_shard(...) out of configure_model: auto_wrap_policy says which modules "
            "are units. For parallelize_module(...) set ShardedDP(tensor_parallel_size=...), "
            'which makes self.device_mesh["tensor_parallel"]; else take it out, too'
        ) from error
