"""Plans of a run: `ShardedDP.plan`, a dry run instead of training, and the strategy that `auto` chooses."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from shardeddp import ActivationCheckpointing, MixedPrecision, ShardedDP, TokenDispatch
from shardeddp.checkpoint.random_state import capture_random_state
from shardeddp.config import candidates, choose_sharding, parse_options
from shardeddp.errors import ConfigurationError
from shardeddp.fabric import ShardedDP as FabricStrategy
from shardeddp.lightning import planning as module
from shardeddp.lightning import private
from shardeddp.lightning.planning import (
    RunSetting,
    by_states,
    choose_shard_size,
    choose_strategy,
    plan_as_set,
    planned_precision,
    resized,
)
from shardeddp.plan.hardware import Cluster, find_gpu
from shardeddp.planner.search import Planned
from shardeddp.wrap import NamePolicy
from support.tasks import TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds, on_ranks

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
]

CPU = torch.device("cpu")
PLANNED: dict[str, Any] = {"inputs": ["int64:B,S"], "length": 6, "micro_batches": (2,)}


CLUSTER = Cluster(gpu=find_gpu("A100-80"), count=8, per_node=4)
SPLIT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Reads(TinyGpt):
    """A step whose shapes depend on the data."""

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of as many tokens as the first one says."""
        return super().loss(batch[:, : int(batch[0, 0])])


class LooksAtValues(TinyGpt):
    """A step that checks what it gets and what it makes."""

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss, unless something is wrong."""
        assert (batch >= 0).all()
        loss = super().loss(batch)
        return loss if loss.isfinite() else loss.nan_to_num()


class TakesPairs(TinyGpt):
    """A step on two tensors, one of which no `inputs` describe."""

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of the first of them."""
        tokens, _ = [batch]
        return super().loss(tokens)


class AsksTrainer(TinyGpt):
    """A step that needs its Trainer."""

    def loss(self, batch: Any) -> torch.Tensor:
        """A loss that grows as training goes on."""
        return super().loss(batch) * (1 + self.trainer.global_step)


class NeedsSetup(TinyGpt):
    """A step that needs what `setup` makes."""

    def setup(self, stage: str) -> None:
        """Make a number."""
        self.scale = 2

    def loss(self, batch: Any) -> torch.Tensor:
        """The scaled loss."""
        return super().loss(batch) * self.scale


class OptimizesItself(TinyGpt):
    """A step that runs its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss(self, batch: Any) -> Any:
        """Nothing."""
        self.manual_backward(super().loss(batch))


class SkipsBatches(TinyGpt):
    """A step that trains on no batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Nothing."""


class Logs(AsksTrainer):
    """A step that logs through its Trainer."""

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss, which is logged."""
        loss = super().loss(batch)
        self.log("loss", loss)
        if self.logger is not None:
            self.logger.log_metrics({"loss": loss.item()})
        return loss


class NeedsData(TinyGpt):
    """A model that is built from a file."""

    def __init__(self) -> None:
        super().__init__(num_blocks=int(Path("no such file").read_text()))


class Deferred(TinyGpt):
    """Layers that `configure_model` adds."""

    def configure_model(self) -> None:
        """A fourth block."""
        if len(self.blocks) == 3:
            self.blocks.append(nn.Linear(8, 8))


class HoldsGenerator(TinyGpt):
    """A module that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = (number for number in range(3))


class Tokens(LightningDataModule):
    """Loaders of a data module."""

    def train_dataloader(self) -> Any:
        """Batches of four."""
        return token_loader(16)


# -- ShardedDP.plan


def test_a_module_is_planned_as_its_class_is_and_stays_as_it_was() -> None:
    module = TinyGpt()
    before = {name: (it, it.clone()) for name, it in module.named_parameters()}
    plan, other = (ShardedDP.plan(it, **PLANNED) for it in (module, TinyGpt))
    assert plan.as_json() == other.as_json()
    for name, it in module.named_parameters():
        assert it is before[name][0]
        assert torch.equal(it, before[name][1])
    assert plan.fits
    assert f"sharding_strategy: {plan.best.choice.strategy}" in str(plan)
    assert f"# and DataLoader(batch_size={plan.best.choice.micro_batch})" in str(plan)
    assert json.loads(plan.as_json())[0]["fits"]


def test_layers_that_configure_model_adds_are_planned() -> None:
    more, less = (
        ShardedDP.plan(it, **PLANNED, strategies=["no_shard"], precisions=["32-true"])
        for it in (Deferred(), TinyGpt())
    )
    added = 4 * (8 * 8 + 8)
    assert more.best.memory.parameters - less.best.memory.parameters == pytest.approx(added, abs=64)


def test_a_step_that_checks_values_is_planned_as_one_that_does_not() -> None:
    checks, trusts = (
        ShardedDP.plan(it, **PLANNED, strategies=["full_shard"], precisions=["32-true"]).best
        for it in (LooksAtValues, TinyGpt)
    )
    assert checks.memory.peak == pytest.approx(trusts.memory.peak, abs=64)
    assert checks.memory.parameters == trusts.memory.parameters


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (TinyGpt, {"gpu": "H1000"}, "did you mean H100"),
        (TinyGpt, {"inputs": []}, "no example_input_array"),
        (TinyGpt, {"inputs": ["int64:B,T"]}, "expected DTYPE:SIZES"),
        (TinyGpt, {"gpus": 12}, "a node that is not full"),
        (TinyGpt, {"strategies": ["zero9"]}, "is not known"),
        (TinyGpt, {"precisions": ["fp8"]}, "precision='fp8'"),
        (TinyGpt, {"recomputes": ["half"]}, "recomputes: 'half'"),
        (TinyGpt, {"offloads": ["disk"]}, "offloads: 'disk'"),
        (TinyGpt, {"micro_batches": (0,)}, "micro_batches: 0"),
        (NeedsData, {}, "cannot be built on the meta device"),
        (HoldsGenerator(), {}, "cannot be copied"),
        (Reads, {}, r"does not run without values .* 976 parameters, .* take 15\.\d KiB"),
        (TakesPairs, {}, r"not enough values .*: one --input for each of its tensors"),
        (
            AsksTrainer,
            {},
            r"^AsksTrainer .*: its training step needs a Trainer, .* take 15\.\d KiB",
        ),
        (NeedsSetup, {}, r"needs an attribute that is not there; .* no setup\(\) .* 'scale'\)"),
        (OptimizesItself, {}, "cannot be planned: with automatic_optimization=False it runs"),
        (SkipsBatches, {}, "found NoneType; Lightning skips such a batch"),
        ("no.such.Module", {}, "found nothing"),
        (3, {}, "expected a LightningModule"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(model: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ShardedDP.plan(model, **{**PLANNED, **options})


def test_a_batch_of_another_size_has_the_structure_of_the_given_one() -> None:
    batch = {"x": torch.ones(4, 3), "y": [torch.ones(4), "text"], "shared": torch.ones(2, 4)}
    found = resized(batch, 7)
    assert found["x"].shape == (7, 3)
    assert found["y"][0].shape == (7,)
    assert found["y"][1] == "text"
    assert found["shared"].shape == (2, 4)


@pytest.mark.parametrize(
    ("names", "gpus", "per_node", "sizes"),
    [
        (("full_shard", "hybrid_shard"), 12, 6, {2, 3, 6}),
        (("full_shard", "hybrid_shard"), 24, 4, {2, 4, 8, 12}),
        (("hybrid_shard",), 3, 8, {3}),
        (("hybrid_shard",), 1, 8, {1}),
        (("Hybrid_Shard", "full_shard"), 3, 8, set()),
    ],
)
def test_hybrid_is_planned_in_all_sizes_that_divide_nodes_or_that_nodes_divide(
    names: tuple[str, ...], gpus: int, per_node: int, sizes: set[int]
) -> None:
    plan = ShardedDP.plan(TinyGpt, **PLANNED, strategies=names, gpus=gpus, per_node=per_node)
    found = [it.choice for it in plan.plans if it.choice.recompute == "none"]
    assert {it.shard_size for it in found if it.strategy == "hybrid_shard"} == sizes


@pytest.mark.parametrize(
    ("name", "options", "gathers", "across"),
    [
        ("full_shard", {}, {"forward", "backward"}, None),
        ("full_shard", {"reshard_after_forward": False}, {"forward"}, None),
        ("hybrid_shard", {"shard_size": 4}, {"forward", "backward"}, "all_reduce"),
        (
            "hybrid_shard",
            {"optimizer_shard": "world"},
            {"forward", "backward", "step"},
            "reduce_scatter",
        ),
    ],
)
def test_a_run_is_planned_as_it_is_set(
    name: str, options: dict[str, Any], gathers: set[str], across: str | None
) -> None:
    sharding = choose_sharding(name, **options)
    batch = torch.zeros(4, 6, dtype=torch.long)
    plan = plan_as_set(TinyGpt(), batch, [(name, sharding)], setting(), "A100-80")
    (only,) = plan.plans
    issued = only.task.collectives
    assert {it.phase for it in issued if it.kind == "all_gather"} == gathers
    assert {it.kind for it in issued if it.kind != "all_gather" and it.stride > 1} == (
        {across} if across else set()
    )


def test_units_that_are_gathered_ahead_take_memory_and_hide_gathers() -> None:
    batch = torch.zeros(4, 6, dtype=torch.long)
    sharding = choose_sharding("full_shard")

    def planned(ahead: int, back: int) -> Planned:
        asked = setting(forward_prefetch=ahead, backward_prefetch=back)
        return plan_as_set(TinyGpt(), batch, [("full_shard", sharding)], asked, "A100-80").best

    none, one, two = (planned(1, depth) for depth in (0, 1, 2))
    assert none.memory.peak < one.memory.peak < two.memory.peak
    assert none.step.gathers > one.step.gathers == two.step.gathers
    assert planned(0, 0).step.gathers > none.step.gathers
    assert "prefetch" not in one.choice.yaml(CLUSTER)
    assert "      backward_prefetch: 2\n" in two.choice.yaml(CLUSTER)


# -- no effects on the run


class Draws(TinyGpt):
    """A step that draws numbers on the host."""

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        """The loss, after some draws."""
        random.random()
        np.random.rand()
        torch.manual_seed(7)
        return self.loss(batch)


def test_a_plan_draws_no_random_numbers_of_the_run() -> None:
    def states() -> list[bytes]:
        return [it.numpy().tobytes() for it in capture_random_state(CPU).values()]

    module = Draws()
    before = states()
    plan_whole(module)
    assert states() == before


def plan_whole(module: TinyGpt) -> Planned:
    """A plan of two samples a rank, with the process group that there is."""
    pair = "full_shard", choose_sharding("full_shard")
    batch = torch.zeros(2, 6, dtype=torch.long)
    return plan_as_set(module, batch, [pair], setting("cpu"), "A100-80").best


KEPT = torch.ones(1)
COMMUNICATES: dict[str, Callable[[], object]] = {
    "constant": lambda: dist.all_reduce(torch.tensor(3.0)),
    "object": lambda: dist.broadcast_object_list([1], 0),
    "barrier": dist.barrier,
    "kept": lambda: dist.all_reduce(KEPT),
    "group": lambda: dist.new_group([0]),
}


class Communicates(TinyGpt):
    """Reaches the other ranks in a hook."""

    def __init__(self, hook: str, kind: str) -> None:
        super().__init__()
        self._hook, self._kind = hook, kind

    def configure_model(self) -> None:
        """Waits for the others, perhaps."""
        if self._hook == "configure_model":
            COMMUNICATES[self._kind]()

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        """The loss, after a word with the others, perhaps."""
        if self._hook == "training_step":
            COMMUNICATES[self._kind]()
        return self.loss(batch)


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_plans_issues_no_collective_of_the_user() -> None:
    if dist.get_rank() == 0:
        for kind in ("constant", "object"):
            assert plan_whole(Communicates("training_step", kind)).fits
        for hook, kind, said in (
            ("configure_model", "barrier", r"communicates \(c10d::barrier\)"),
            ("configure_model", "group", r"communicates \(new_group\)"),
            ("training_step", "group", r"communicates \(new_group\)"),
            ("training_step", "kept", "with a tensor that was made outside of it"),
        ):
            with pytest.raises(ConfigurationError, match=said):
                plan_whole(Communicates(hook, kind))
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    assert total == 3, "the first collective of both ranks"


# -- dry run


def dry_trainer(strategy: ShardedDP, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        enable_checkpointing=False,
        **{"logger": False, **options},
    )


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.parametrize(
    ("data", "name"),
    [("loader", "shard_grad_op"), ("datamodule", "hybrid_shard"), ("example", "full_shard")],
)
def test_a_dry_run_plans_the_module_that_is_there_and_trains_nothing(
    capsys: pytest.CaptureFixture[str], data: str, name: str
) -> None:
    module = TinyGpt()
    strategy = ShardedDP(name, plan_only="A100-80", forward_prefetch=2, backward_prefetch=0)
    trainer = dry_trainer(strategy, accumulate_grad_batches=2)
    if data == "example":
        module.example_input_array = torch.zeros(4, 6, dtype=torch.long)
    trainer.fit(
        module,
        token_loader(16) if data == "loader" else None,
        datamodule=Tokens() if data == "datamodule" else None,
    )
    text = capsys.readouterr().out
    assert "parameters) on 2 x A100-80" in text
    assert f"As configured ({name} over 2, micro-batch 4 x 2)" in text
    assert "nothing was trained" in text
    assert not module.losses
    assert not torch.distributed.is_initialized()
    assert trainer.state.finished
    assert trainer.global_step == 0
    assert strategy.planned is not None
    choices = [it.choice for it in strategy.planned.plans]
    assert {it.micro_batch for it in choices} == {1, 2, 4}
    assert {(it.forward_prefetch, it.backward_prefetch) for it in choices} == {(2, 0)}
    assert "forward_prefetch: 2\n      backward_prefetch: 0\n" in text


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_a_step_has_its_trainer_in_a_dry_run_and_logs_nothing(tmp_path: Path) -> None:
    module, logger = Logs(), CSVLogger(tmp_path)
    strategy = ShardedDP("full_shard", plan_only="A100-80")
    trainer = dry_trainer(strategy, logger=logger)
    trainer.fit(module, token_loader(16))
    assert strategy.planned is not None
    assert (trainer.loggers, trainer.logged_metrics) == ([logger], {})
    assert not [*tmp_path.iterdir()]
    assert "log" not in vars(module)


class Unpacks(TinyGpt):
    """Takes its tokens out of what the loader has."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> torch.Tensor:
        """The tokens, where a Trainer trains."""
        assert self.trainer.training
        return batch["tokens"]


class Cuts(LightningDataModule):
    """Cuts sequences before a module gets them."""

    def train_dataloader(self) -> Any:
        """One batch of one sample."""
        samples: Any = [{"tokens": torch.zeros(9, dtype=torch.long)}]
        return DataLoader(samples)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Its first six tokens."""
        return {"tokens": batch["tokens"][:, :6]}


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_a_dry_run_plans_the_batch_that_hooks_make_of_that_of_the_loader() -> None:
    strategy, module = ShardedDP(plan_only="A100-80"), Unpacks()
    dry_trainer(strategy).fit(module, datamodule=Cuts())
    assert strategy.planned is not None
    assert strategy.planned.best.tokens == 2 * 6
    assert private.trainer_of(module) is None


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_a_dry_run_without_a_batch_or_of_something_else_says_so() -> None:
    trainer = dry_trainer(ShardedDP(plan_only=True))
    with pytest.raises(ConfigurationError, match="expected a batch to plan with, found none"):
        trainer.fit(TinyGpt())
    with pytest.raises(ConfigurationError, match="plans a training"):
        trainer.predict(TinyGpt(), token_loader(16))
    with pytest.raises(ConfigurationError, match="GPU 'H1000'"):
        ShardedDP(plan_only="H1000")
    with pytest.raises(ConfigurationError, match="plan_only=1"):
        ShardedDP(plan_only=1)  # type: ignore[arg-type]


# -- auto


def setting(device: str = "cuda", **options: Any) -> RunSetting:
    asked = {"sharding_strategy": "auto", "auto_wrap_policy": NamePolicy(("blocks.*",)), **options}
    return RunSetting(
        options=parse_options(asked),
        precision="32-true",
        device=torch.device(device),
        num_nodes=2,
        ranks_per_node=4,
        accumulates=1,
    )


AUTO_SIZE = {"sharding_strategy": "hybrid_shard", "shard_size": "auto"}


def test_options_decide_which_strategies_are_candidates() -> None:
    assert list(candidates()) == [
        "full_shard",
        "hybrid_shard",
        "shard_grad_op",
        "shard_optimizer",
        "no_shard",
    ]
    assert list(candidates(shard_size=2)) == ["hybrid_shard"]
    assert list(candidates(reshard_after_forward=False)) == list(candidates())[:3]
    with pytest.raises(ConfigurationError, match="no strategy goes with"):
        candidates(reshard_after_forward=0.5)


def test_less_memory_makes_for_more_sharding() -> None:
    module = TinyGpt(dim=64)
    states = 4 * 4 * sum(it.numel() for it in module.parameters())
    found = [
        by_states(module, candidates(), setting(), int(memory)).sharding_strategy
        for memory in (20 * states, 2.1 * states, 0.1 * states)
    ]
    assert found[0] == "no_shard"
    assert found[1] in ("shard_optimizer", "shard_grad_op", "hybrid_shard")
    assert found[2] == "full_shard"


class Device:
    """A device of CUDA as the driver describes it."""

    def __init__(self, name: str, total_memory: int) -> None:
        self.name, self.total_memory = name, total_memory


@pytest.mark.parametrize(
    ("device", "module", "name", "reason"),
    [
        (Device("NVIDIA H100 80GB HBM3", 85 * 10**9), TinyGpt(), "no_shard", "no example_input"),
        (Device("RTX 9999", 8_000), Deferred(), "full_shard", "RTX 9999 is not in the table"),
        (Device("RTX 9999", 8_000), HoldsGenerator(), "full_shard", "cannot be copied"),
    ],
)
def test_on_a_gpu_memory_decides_and_the_reason_says_what_is_not_known(
    monkeypatch: pytest.MonkeyPatch, device: Device, module: Any, name: str, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    chosen = choose_strategy(module, setting())
    assert chosen.sharding_strategy == name
    assert reason in chosen.reason
    assert len(module.blocks) == 3


@pytest.mark.parametrize("known", [True, False])
def test_on_a_gpu_with_an_example_the_predicted_time_decides(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    device = Device("NVIDIA A100-SXM4-80GB", 80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    module = TinyGpt() if known else Reads()
    module.example_input_array = torch.zeros(4, 6, dtype=torch.long)
    chosen = choose_strategy(module, setting())
    if known:
        assert "the fastest that fits 8 x A100-80 by the plan" in chosen.reason
    else:
        assert "its step could not be planned: Reads does not run without values" in chosen.reason


def test_without_known_hardware_the_first_in_a_fixed_order_is_taken() -> None:
    chosen = choose_strategy(TinyGpt(), setting("cpu"))
    assert chosen.sharding_strategy == "full_shard"
    assert "memory of cpu is not known" in chosen.reason


def test_without_a_plan_as_many_ranks_share_a_model_as_need_no_network() -> None:
    asked = setting("cpu", **AUTO_SIZE)
    found = [choose_shard_size(TinyGpt(), asked, reach) for reach in (4, 8)]
    assert [(it.shard_size, it.reason) for it in found] == [
        (4, "the ranks of a node"),
        (8, "the ranks of an NVLink domain"),
    ]


@pytest.mark.parametrize(("memory", "size"), [(180 * 10**9, 2), (10**9, 8)])
def test_by_the_plan_the_fastest_shard_size_that_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch, memory: int, size: int
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: Device("NVIDIA B200", memory)
    )
    monkeypatch.setattr("shardeddp.lightning.planning.gpu_at", lambda _: "B200")
    module = TinyGpt()
    module.example_input_array = torch.zeros(4, 6, dtype=torch.long)
    chosen = choose_shard_size(module, setting(**AUTO_SIZE), 4)
    assert chosen.shard_size == size
    assert "by the plan" in chosen.reason


def share_and_save(folder: str) -> tuple[int, dict[str, Any]]:
    """Ranks of a group, and what the checkpoint says of the choice."""
    strategy = ShardedDP("hybrid_shard", "auto", {"Block"})
    trainer = make_trainer(strategy, max_steps=1, default_root_dir=folder)
    trainer.fit(TinyGpt(), token_loader(16))
    trainer.save_checkpoint(f"{folder}/chosen.ckpt")
    kept = torch.load(f"{folder}/chosen.ckpt", weights_only=True)["shardeddp"]["chosen"]
    return strategy.mesh.topology.shard_size, kept


@pytest.mark.slow
def test_a_run_chooses_its_shard_size_and_the_checkpoint_says_why(
    world: Worlds, tmp_path: Path
) -> None:
    for size, kept in world(3).run(share_and_save, str(tmp_path)):
        assert size == kept["shard_size"] == 3
        assert kept["reason"] == "the ranks of a node"


def test_a_shard_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected a number of ranks, 'auto' or None"):
        ShardedDP("hybrid_shard", "node")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="goes with sharding_strategy='hybrid_shard'"):
        ShardedDP("full_shard", "auto")


MODULES = {
    "raises.py": "raise KeyError('data')",
    "ends.py": "raise SystemExit(0)",
    "broken.py": "def",
    "needs.py": "import there_is_no_such_package",
    "outer.py": """
import torch
class Outer:
    class Net(torch.nn.Module):
        def training_step(self, batch, index):
            raise KeyError("inner")
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
""",
    "package/__init__.py": "",
    "package/needs.py": "import there_is_no_such_package",
    "package/attribute.py": "import math; math.there_is_no_such_name",
    "steps.py": """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def training_step(self, batch, index):
        raise SystemExit(0)
""",
    "lazy.py": """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LazyLinear(2)
""",
}


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("raises.py", "importing raises fails (KeyError: 'data')"),
        ("ends.py", "importing ends fails (SystemExit: 0)"),
        ("broken.py", "importing broken fails (SyntaxError: "),
        ("needs.py", "No module named 'there_is_no_such_package'"),
        ("package/needs.py", "No module named 'there_is_no_such_package'"),
        ("package/attribute.py", "importing package.attribute fails (AttributeError: "),
        ("package/missing.py", "found nothing. Is its folder on PYTHONPATH?"),
        ("outer/Outer.py", "Net does not run without values (KeyError: 'inner')"),
        ("steps.py", "Net cannot be planned: its training step ends the process (SystemExit: 0)"),
        ("lazy.py", "get their shapes from data (nn.Lazy...: layer.weight"),
        ("missing.py", "found nothing. Is its folder on PYTHONPATH?"),
    ],
)
def test_a_module_that_fails_is_told_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, said: str
) -> None:
    (tmp_path / "package").mkdir()
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        ShardedDP.plan(f"{file[:-3].replace('/', '.')}.Net", inputs=["float32:B,2"])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "\udcff",
        "[1]",
        '{"model": 1}',
        "model: {class_path: 5}",
        "model: {class_path: a.B, init_args: 5}",
    ],
)
def test_a_file_that_names_no_module_is_an_error_of_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "model.yaml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigurationError, match=r"model\.yaml"):
        ShardedDP.plan(str(file))


def test_precisions_of_the_trainer_have_names_of_the_planner() -> None:
    names = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"]
    assert [planned_precision(name, None) for name in names] == [
        "32-true",
        "bf16-mixed",
        "16-mixed",
        "bf16-true",
        "16-true",
        "64-true",
    ]
    for dtype, name in (
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("float32", "32-true"),
    ):
        assert planned_precision("32-true", MixedPrecision(param_dtype=dtype)) == name
    assert planned_precision("bf16-mixed", MixedPrecision(param_dtype="fp16")) == "bf16-mixed"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixed_precision": MixedPrecision(reduce_dtype="bf16", keep_fp32=["LayerNorm"])}, ""),
        ({"uneven_units": True}, ""),
        ({"activation_checkpointing": "auto"}, ""),
        (
            {
                "activation_checkpointing": ActivationCheckpointing(
                    modules=NamePolicy(["blocks.*"]), every=2, save_ops="mm"
                )
            },
            "",
        ),
        (
            {"activation_checkpointing": {"Linear"}},
            "activation_checkpointing of modules that are no units (blocks.0.up",
        ),
        ({"activation_checkpointing": ActivationCheckpointing(cpu_offload=True)}, ""),
    ],
)
def test_settings_that_plans_do_not_know_are_named(options: dict[str, Any], said: str) -> None:
    batch, sharding = torch.zeros(2, 6, dtype=torch.long), choose_sharding("full_shard")
    pairs = [("full_shard", sharding)]
    plan = plan_as_set(TinyGpt(), batch, pairs, setting(**options), "A100-80")
    assert bool(plan.unplanned) == bool(said)
    assert said in "".join(plan.unplanned)


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_a_dry_run_and_a_choice_say_which_settings_they_do_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {"Linear"}
    strategy = ShardedDP("full_shard", plan_only="A100-80", activation_checkpointing=unknown)
    module = TinyGpt()
    module.example_input_array = torch.zeros(1, 6, dtype=torch.long)
    dry_trainer(strategy).fit(module)
    said = "does not know activation_checkpointing of modules that are no units (blocks.0.up"
    assert f"The plan {said}" in capsys.readouterr().out
    device = Device("NVIDIA A100-SXM4-80GB", 80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    assert said in choose_strategy(module, setting(activation_checkpointing=unknown)).reason


@pytest.mark.parametrize(
    "option",
    [
        {"sharding_strategy": "auto"},
        {"sharding_strategy": "hybrid_shard", "shard_size": "auto"},
        {"plan_only": True},
    ],
)
def test_expert_parallel_runs_are_planned_and_tensor_parallel_ones_where_a_plan_names_the_layers(
    option: dict[str, Any],
) -> None:
    with pytest.raises(ConfigurationError, match="does not work together"):
        ShardedDP(**option, tensor_parallel_size=2)
    ShardedDP(**option, tensor_parallel_size=2, tensor_parallel_plan=SPLIT)
    ShardedDP(**option, expert_parallel_size=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_a_dry_run_plans_the_ranks_that_split_layers(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ShardedDP(plan_only="A100-80", tensor_parallel_size=2, tensor_parallel_plan=SPLIT)
    dry_trainer(strategy).fit(TinyGpt(), token_loader(16))
    text = capsys.readouterr().out
    assert "TP: neighbouring ranks that split each layer" in text
    assert "As configured (full_shard over 1, micro-batch 4 x 1)" in text
    assert strategy.planned is not None
    assert strategy.planned.best.step.exchanges > 0


class Mixed(TinyGpt):
    """Has experts beside its blocks, and sends them tokens in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def training_step(self, tokens: torch.Tensor, batch_index: int) -> torch.Tensor:
        """The loss with what experts say."""
        x = torch.ones(tokens.shape[0] * 4, 8, device=tokens.device)
        index = torch.arange(x.shape[0], device=tokens.device).view(-1, 1) % 4
        routed = TokenDispatch(index, self.experts)
        parts = routed.dispatch(x).split(routed.counts)
        rows = [self.experts[it](part) for it, part in zip(routed.experts, parts, strict=True)]
        return super().training_step(tokens, batch_index) + routed.combine(torch.cat(rows)).mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_a_dry_run_plans_the_ranks_that_divide_experts(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ShardedDP(plan_only="A100-80", expert_parallel_size=2, experts="experts.*")
    dry_trainer(strategy).fit(Mixed(), token_loader(16))
    text = capsys.readouterr().out
    assert "EP: neighbouring ranks that have different experts" in text
    assert "experts: experts.*" in text
    assert strategy.planned is not None
    assert strategy.planned.best.step.exchanges > 0


def test_a_choice_knows_which_ranks_have_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("NVIDIA A100-SXM4-80GB", 80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    module = Mixed()
    two, three = (setting(expert_parallel_size=size, experts="experts.*") for size in (2, 3))
    assert "no example_input" in choose_strategy(module, two).reason
    module.example_input_array = torch.zeros(4, 6, dtype=torch.long)
    assert "by the plan" in choose_strategy(module, two).reason
    assert "does not divide" in choose_strategy(module, three).reason


@pytest.mark.slow
def test_a_choice_is_of_the_ranks_with_different_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("NVIDIA A100-SXM4-80GB", 80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    axis = {"tensor_parallel_size": 2, "tensor_parallel_plan": SPLIT}
    split, sized = setting(**axis), setting(**AUTO_SIZE, **axis)
    module = TinyGpt()
    by_memory = choose_strategy(module, split)
    assert by_memory.sharding_strategy == "no_shard" and "no example_input" in by_memory.reason
    assert choose_shard_size(module, sized, 4).shard_size == 2
    module.example_input_array = torch.zeros(4, 6, dtype=torch.long)
    assert "by the plan" in choose_strategy(module, split).reason
    assert choose_shard_size(module, sized, 4).shard_size in (2, 4)


def test_fabric_says_what_to_write_instead() -> None:
    with pytest.raises(ConfigurationError, match=r"ShardedDP.plan\(model\)"):
        FabricStrategy("auto")
    with pytest.raises(ConfigurationError, match=r"ShardedDP.plan\(model\)"):
        FabricStrategy("hybrid_shard", shard_size="auto")


def choose_and_resume(folder: str) -> dict[str, Any]:
    """A run whose ranks would choose differently, as rank 0 alone is told to, and one that goes on from it."""
    original = module.choose_strategy
    if torch.distributed.get_rank() == 0:
        module.choose_strategy = lambda *_: module.Chosen(
            sharding_strategy="no_shard", reason="said so"
        )
    strategy = ShardedDP("Auto", auto_wrap_policy={"Block"})
    trainer = make_trainer(strategy, max_steps=2, default_root_dir=folder)
    try:
        trainer.fit(TinyGpt(), token_loader(16))
    finally:
        module.choose_strategy = original
    path = f"{folder}/chosen.ckpt"
    trainer.save_checkpoint(path)
    other = ShardedDP("auto", auto_wrap_policy={"Block"})
    later = make_trainer(other, max_steps=3, default_root_dir=folder)
    later.fit(TinyGpt(), token_loader(16), ckpt_path=path)
    return {
        "kept": torch.load(path, weights_only=True)["shardeddp"]["chosen"],
        "sizes": [it.mesh.topology.shard_size for it in (strategy, other)],
        "chosen": [vars(it.chosen)["sharding_strategy"] for it in (strategy, other)],
        "steps": later.global_step,
    }


def test_all_ranks_train_as_rank_zero_has_chosen_and_the_checkpoint_says_why(
    world: Worlds, tmp_path: Path
) -> None:
    for it in world(2).run(choose_and_resume, str(tmp_path)):
        assert it["chosen"] == ["no_shard", "full_shard"]
        assert it["sizes"] == [1, 2]
        assert it["kept"] == {
            "sharding_strategy": "no_shard",
            "reason": "said so",
            "shard_size": None,
        }
        assert it["steps"] == 3
