"""Corpora of small models that train beside DistributedDataParallel, many of them in one call of the world."""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardeddp import AutoPolicy, SizePolicy
from support.parity import Run, Trained, assert_same_training
from support.tasks import Block, TinyGpt, token_loader
from world import Worlds

TOGETHER_TIMEOUT_S, ALONE_TIMEOUT_S = 150.0, 30.0

STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "hybrid_shard": {"shard_size": 2},
    "shard_grad_op": {},
    "shard_optimizer": {},
    "no_shard": {},
}
"""Blocks are units."""

UNITS_TOO: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    # The default policy makes one unit of a model this small.
    "full_shard in one unit": {"auto_wrap_policy": "auto"},
    "no_shard in one unit": {"auto_wrap_policy": "auto"},
    "full_shard of every leaf": {"auto_wrap_policy": SizePolicy(min_numel=1)},
}
"""The same, and other units where it matters what a unit is; the first word is the strategy."""

EVERY_BACKWARD: dict[str, dict[str, Any]] = {
    f"{name}, reduced at every backward": {**arguments, "reduce_every_backward": True}
    for name, arguments in STRATEGIES.items()
}
"""Micro-batches leave averages of shard groups, which replicas share with the last; also where that is no default."""

ELEMENT_WISE: dict[str, dict[str, Any]] = {
    f"{name}, element-wise": {**arguments, "optimizer_scope": {"ByDifferences": "element"}}
    for name, arguments in STRATEGIES.items()
}
"""Optimizers of that class step on local gradients, and keep those."""

# Ours that say "the result is right", which is what is tested; and DDP's where nothing was unused after all.
EXPECTED = (
    "parameter .* is used outside the forward|nothing is known about the optimizer|units run in another|"
    "unit .* its unsharded parameters stay in memory|unit .* holds .* parameters: while it is unsharded|"
    "find_unused_parameters=True was specified"
)


@dataclass(frozen=True, kw_only=True)
class Case(Run):
    """A training of the corpus."""

    units: Any = None
    """The policy where blocks are units; repeated modules where it is None."""

    refused: str = ""
    """Instead of training, an error with this text (a pattern) is as good; nothing: it has to train."""

    @property
    def key(self) -> str:
        """Where the model is, too: names may be of several files."""
        return f"{self.model.__module__}.{self.name}"

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.__name__ + (" in bf16-mixed" if self.options.get("precision") else "")


def case(model: Callable[[], Any], **options: Any) -> Case:
    """A few steps of a model; a parameter that a step does not use is no matter for DDP."""
    usual = {
        "loader": token_loader,
        "steps": 4,
        "warns": EXPECTED,
        "ddp": {"find_unused_parameters": True},
    }
    return Case(model=model, **{**usual, **options})


def in_bf16(of: Case) -> Case:
    """The same under bf16-mixed."""
    options = {**of.options, "precision": "bf16-mixed"}
    return replace(of, options=options)


class SmallGpt(TinyGpt):
    """Two blocks under SGD: other than Adam's steps, its steps are as long as gradients are."""

    def __init__(self) -> None:
        super().__init__(dim=8, num_blocks=2)

    def configure_optimizers(self) -> Any:
        """Momentum on all that trains."""
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9
        )


class ScaledBlock(nn.Module):
    """A block with an element-wise weight."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Any, *args: Any) -> Any:
        """Shape (..., 8) to the same; subclasses take and return other things."""
        return self.block(x) * self.scale


class OfUnits(SmallGpt):
    """Two units of a class between embedding and head."""

    unit: type[nn.Module] = ScaledBlock

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.unit() for _ in range(2))

    def run(self, x: Tensor) -> Tensor:
        """From embedded tokens to features."""
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of tokens."""
        return self.head(self.run(self.embed(tokens)))


def ranks_of(strategy: str) -> int:
    """Two replicates of two ranks, or two ranks."""
    return 4 if strategy.startswith("hybrid") else 2


def train_in_turn(cases: Sequence[Case], strategy: str | None) -> list[Trained]:
    """Train each case on this rank, under the strategy of that name or under DDP."""
    trained = list[Trained]()
    for each in cases:
        with warnings.catch_warnings():
            if strategy is None:
                trained.append(each.under_ddp())
            else:
                chosen = {**UNITS_TOO, **EVERY_BACKWARD, **ELEMENT_WISE}[strategy]
                arguments = {"auto_wrap_policy": each.units or AutoPolicy(min_numel=1), **chosen}
                trained.append(each.sharded(re.split("[ ,]", strategy)[0], **arguments))
    return trained


class BesideDdp:
    """Trains corpora under a strategy and under DDP, the latter once in a session.

    Args:
        world: Where they are trained.
        train: How they are, on each rank, under a strategy.
    """

    def __init__(
        self, world: Worlds, train: Callable[[Sequence[Case], str], list[Trained]] = train_in_turn
    ) -> None:
        self._world = world
        self._train_sharded = train
        self._references = dict[tuple[str, int], list[Trained]]()

    def __call__(self, cases: Sequence[Case], strategy: str) -> None:
        """Fail with the name of every case that does not train as under DDP, and how."""
        found = self.differences(cases, strategy)
        assert not found, "\n".join(
            [f"{len(found)} of {len(cases)}:", *(f"{name}: {how}" for name, how in found.items())]
        )

    def differences(self, cases: Sequence[Case], strategy: str) -> dict[str, str]:
        """By name of the case, how it fails; nothing for those that train as under DDP."""
        size = ranks_of(strategy)
        expected = self._under_ddp(cases, size)
        can_train = [each for each in cases if not each.refused]
        try:
            results: dict[str, Any] = self._train(can_train, strategy, size)
        except Exception:  # noqa: BLE001 - it may be any: of a model, of a rank that died, of one that waits
            results = {each.name: self._alone(each, strategy) for each in can_train}
        results.update({each.name: self._alone(each, strategy) for each in cases if each.refused})
        found = {
            each.name: _difference(each, strategy, results[each.name], expected[each.name])
            for each in cases
        }
        return {name: how for name, how in found.items() if how}

    def _train(
        self,
        cases: Sequence[Case],
        strategy: str | None,
        size: int,
        timeout_s: float = TOGETHER_TIMEOUT_S,
    ) -> dict[str, list[Trained]]:
        train = train_in_turn if strategy is None else self._train_sharded
        ranks = self._world(size).run(train, cases, strategy, timeout_s=timeout_s)
        return {each.name: [rank[index] for rank in ranks] for index, each in enumerate(cases)}

    def _alone(self, only: Case, strategy: str) -> list[Trained] | Exception:
        try:
            return self._train([only], strategy, ranks_of(strategy), ALONE_TIMEOUT_S)[only.name]
        except Exception as error:  # noqa: BLE001 - as above
            return error

    def _under_ddp(self, cases: Sequence[Case], size: int) -> dict[str, list[Trained]]:
        missing = [each for each in cases if (each.key, size) not in self._references]
        found = self._train(missing, None, size) if missing else {}
        self._references.update({(each.key, size): found[each.name] for each in missing})
        return {each.name: self._references[each.key, size] for each in cases}


def _difference(
    of: Case, strategy: str, found: list[Trained] | Exception, expected: list[Trained]
) -> str:
    if isinstance(found, Exception):
        text = f"{type(found).__name__}: {found}"
        if of.refused and re.search(of.refused, text, re.DOTALL):
            return ""
        return "\n    ".join([text, *str(found.__cause__).splitlines()[-8:]])
    # Two ranks add in one order only. Where sums have another order than DDP's, the last bit of a float32 may differ,
    # and where bfloat16 rounds the two apart, its last bit does, which is 4e-3.
    in_order = ranks_of(strategy) == 2 and "every leaf" not in strategy
    try:
        assert_same_training(
            found, expected, 1e-5 if in_order or not of.options.get("precision") else 3e-3
        )
    except AssertionError as error:
        return f"trains otherwise: {error}"
    return ""
