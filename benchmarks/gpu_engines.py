"""The engines that `gpu.py` compares, built from meta, and a world of ranks without peers to build them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import MixedPrecision as FSDP1Precision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg as _registers_fake  # noqa: F401 - the backend

from llama import Block, Llama, LlamaConfig
from shardeddp.comm import Mesh
from shardeddp.config import MixedPrecision, parse_options
from shardeddp.engine.dtypes import assign_dtypes, cast_at_boundaries
from shardeddp.engine.shard_model import shard_model
from shardeddp.optim.attach import attach_optimizer
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.wrap import NamePolicy, build_units

TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """In which dtypes all engines alike keep, compute with and reduce parameters."""

    main: torch.dtype
    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype


PRECISIONS = {
    "bf16-true": Dtypes(main=torch.bfloat16, reduce=torch.bfloat16),
    "bf16-mixed": Dtypes(main=torch.float32, reduce=torch.float32),
}


class Engine:
    """A model that is trained in some way.

    Args:
        model: It is called with tokens.
        optimizer: Over its parameters.
        around: Surrounds a forward; yields a list that the loss is appended to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        around: Callable[[], AbstractContextManager[list[Any]]] | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._around = around or (lambda: nullcontext([]))
        self._autocast = autocast

    def accumulate(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward and backward of next-token prediction; the loss."""
        with self._around() as outputs:
            with self._autocast():
                logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            outputs.append(loss)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """Optimizer step; gradients are dropped."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(model: Llama, device: torch.device, dtypes: Dtypes) -> Engine:
    """One process, nothing sharded."""
    model.to_empty(device=device)
    fill(model)
    casts = dtypes.main is not dtypes.compute
    return Engine(
        model,
        adamw(model),
        autocast=lambda: torch.autocast(device.type, dtypes.compute) if casts else nullcontext(),
    )


def fsdp1(model: Llama, device: torch.device, dtypes: Dtypes) -> Engine:
    """FullyShardedDataParallel, every block wrapped."""
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=FSDP1Precision(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce),
        param_init_fn=lambda module: module.to_empty(device=device, recurse=False),
        device_id=device,
        use_orig_params=True,
    )
    fill(wrapped)
    return Engine(wrapped, adamw(wrapped))


def fsdp2(model: Llama, device: torch.device, dtypes: Dtypes) -> Engine:
    """fully_shard of every block and of the whole."""
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device=device)
    fill(model)
    return Engine(model, adamw(model))


def sharded_dp(strategy: str) -> Callable[[Llama, torch.device, Dtypes], Engine]:
    """ShardedDP's engine with a strategy, every block a unit."""

    def build(model: Llama, device: torch.device, dtypes: Dtypes) -> Engine:
        asked = parse_options({"sharding_strategy": strategy})
        # A machine has eight devices, or as many as there are ranks.
        world_size = dist.get_world_size()
        per_node = min(8, world_size)
        mesh = Mesh(asked.sharding.topology(world_size // per_node, per_node), device, TIMEOUT)
        options = MixedPrecision(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce)
        units = assign_dtypes(model, build_units(model, NamePolicy(("blocks.*",))), options, None)
        cast_at_boundaries(model, units, options)

        def load() -> None:
            """Stand for a checkpoint: nothing is drawn on the host, whose random numbers would take minutes."""
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()

        runtime = shard_model(units, mesh, asked, load=load)
        fill(model)
        optimizer = adamw(model)
        attach_optimizer(optimizer)
        return Engine(model, optimizer, lambda: runtime.step("training_step"))

    return build


ENGINES: dict[str, Callable[[Llama, torch.device, Dtypes], Engine]] = {
    "plain": plain,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    **{
        name: sharded_dp(name)
        for name in ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
    },
}


def build_engine(name: str, config: LlamaConfig, device: torch.device, precision: str) -> Engine:
    """Make a model on the meta device and shard it; the whole is never on this rank unless the engine is plain."""
    dtypes = PRECISIONS[precision]
    with torch.device("meta"):
        model = Llama(config).to(dtypes.main)
    return ENGINES[name](model, device, dtypes)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Random values for what this rank holds of every parameter."""
    for parameter in model.parameters():
        local = parameter.detach()
        if isinstance(local, DTensor | ShardTensor):
            local = local.to_local()
        if local.numel():
            local.normal_(std=0.02)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW: the others keep temporaries of the size of all parameters, which would hide the engines' peaks."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@contextmanager
def world(size: int, device: torch.device) -> Iterator[None]:
    """Be rank 0 of ``size`` ranks: alone with the device's own backend, or on torch's fake one, which has no peers.

    A fake group copies this rank's part to everybody's place in a gather and leaves what is reduced as it is: memory,
    launches and order are those of the real run, values and the time of transfers are not.
    """
    if size == 1:
        backend, store = (
            ("nccl" if device.type == "cuda" else "gloo"),
            dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False),
        )
        dist.init_process_group(
            backend,
            store=store,
            rank=0,
            world_size=1,
            device_id=device if device.type == "cuda" else None,
        )
        yield
    else:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
        with patch.object(dist, "new_group", _fake_group(dist.new_group)):
            yield
    dist.destroy_process_group()


def _fake_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Without its peers the host group that ranks agree in cannot be gloo's either."""

    def create(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return new_group(*args, **options)

    return create
