"""Plans of modules as users write them: what is counted, what is traced anew, what is refused."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from shardeddp.config import ActivationCheckpointing, MixedPrecision
from shardeddp.errors import ConfigurationError, UsageError
from shardeddp.planner.cost import FITTED
from shardeddp.planner.plan import Plan, make_plan
from shardeddp.planner.search import PCIE_GBS
from shardeddp.planner.source import tokens_of
from shardeddp.planner.trace import PRECISIONS
from shardeddp.planner.transformer import Dimensions
from shardeddp.wrap import NamePolicy, SizePolicy, resolve_policy

pytestmark = pytest.mark.timeout(120)

WIDTH = 64
GIB = 2**30


class Module(LightningModule):
    """A layer that trains on vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.example_input_array: Any = torch.zeros(4, WIDTH)

    def training_step(self, batch: Any) -> Any:
        """A loss of the batch."""
        return self.layer(batch).pow(2).mean()


class MemoryBank(Module):
    """A layer beside a large buffer, which two names share."""

    def __init__(self, gib: int) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(gib * GIB // 4 // WIDTH, WIDTH))
        self.register_buffer("view", self.bank[:8])

    def training_step(self, batch: Any) -> Any:
        """A loss of the batch beside the bank."""
        return super().training_step(batch) + self.bank[:4].mean()


class Contrastive(Module):
    """A loss over all pairs of samples."""

    def training_step(self, batch: Any) -> Any:
        """Cross-entropy of similarities."""
        features = self.layer(batch)
        targets = torch.arange(len(features), device=features.device)
        return F.cross_entropy(features @ features.T, targets)


class Measured(Module):
    """A step with a metric, and with tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.weight = torch.ones(WIDTH)
        self.scales = {"loss": [torch.ones(())]}

    def training_step(self, batch: Any) -> Any:
        """A weighted loss, which the metric notes."""
        loss = (self.layer(batch) * self.weight).pow(2).mean() * self.scales["loss"][0]
        self.metric(loss)
        return loss


class ByName(Module):
    """Batches are mappings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.example_input_array = {"ids": torch.zeros(4, 12, dtype=torch.long)}

    def training_step(self, batch: Any) -> Any:
        """A loss of embedded ids."""
        return super().training_step(self.embedding(batch["ids"]))


@dataclass
class Pair:
    """A batch that is a dataclass."""

    first: torch.Tensor
    second: torch.Tensor


class Pairs(Module):
    """Batches are dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = Pair(torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))

    def training_step(self, batch: Any) -> Any:
        """A loss of both tensors."""
        return super().training_step(batch.first + batch.second)


@dataclass(frozen=True)
class Fixed:
    """A batch that cannot be changed, and so not be moved to a device."""

    first: torch.Tensor


class Fixes(Module):
    """Batches are frozen dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = Fixed(torch.zeros(4, WIDTH))


def test_a_frozen_batch_is_refused_with_what_to_name_instead() -> None:
    with pytest.raises(ConfigurationError, match=r"frozen dataclass.*--input"):
        make_plan(Fixes)


class HeadAlone(Module):
    """A model of which no unit runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def test_units_that_never_run_are_planned() -> None:
    plan = make_plan(HeadAlone, auto_wrap_policy=NamePolicy(["blocks.*"]), micro_batches=1)
    assert {it.choice.strategy for it in plan.plans} >= {"full_shard", "no_shard"}


def test_a_batch_may_be_a_dataclass() -> None:
    planned, other = (make_plan(it, micro_batches=8).best for it in (Pairs, Module))
    assert planned.model_flops == other.model_flops


class Attending(Module):
    """Attention with dropout, by torch's layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0)
        self.layer.self_attn.dropout = dropout
        self.example_input_array = torch.zeros(2, 512, WIDTH)


def planned(module: nn.Module | type[nn.Module], **options: Any) -> Plan:
    options = {"strategies": ["full_shard"], "recomputes": ["none"], "gpus": 2} | options
    return make_plan(module, **{"micro_batches": [4], **options})


class Shared(Module):
    """Two layers over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight.data = self.layer.weight.data

    def training_step(self, batch: Any) -> Any:
        """A loss of both layers."""
        return super().training_step(self.head(batch))


def test_inputs_of_recomputed_units_go_to_the_host_and_come_back() -> None:
    dims = Dimensions(layers=3, width=WIDTH, heads=4, vocabulary=128)
    options: dict[str, Any] = {"length": 32, "recomputes": "full", "micro_batches": 2}
    on_device, on_host = (
        make_plan(dims, activation_checkpointing=ActivationCheckpointing(cpu_offload=it), **options)
        for it in (False, True)
    )
    nbytes = 3 * 2 * 32 * WIDTH * 4
    assert (on_device.best.memory.host, on_host.best.memory.host) == (0, nbytes)
    more = on_host.best.step.recompute - on_device.best.step.recompute
    assert more == pytest.approx(2 * nbytes / (PCIE_GBS * 1e9))
    assert "cpu_offload: true" in on_host.yaml and not on_host.unplanned


def test_steps_are_slower_where_the_allocator_cannot_keep_its_blocks() -> None:
    dims = Dimensions(layers=16, width=2048, heads=16, vocabulary=32000)
    options: dict[str, Any] = {"length": 4096, "gpus": 1, "strategies": "no_shard"}
    options |= {"recomputes": "none", "micro_batches": 1}
    figures = {"bf16_tflops": 1000.0, "memory_tbs": 3.0, "link_gbs": 400.0}

    def with_memory(gigabytes: float) -> Plan:
        gpu_figures = {**figures, "memory_gb": gigabytes}
        return make_plan(dims, gpu="mine", gpu_figures=gpu_figures, **options)

    roomy = with_memory(1000.0)
    memory, compute = roomy.best.memory, roomy.best.step.compute
    wanted = memory.reserved + memory.context
    assert wanted == memory.peak + memory.optimizer
    for lacking, slowdown in ((0.0, 0.0), (0.02, 0.4), (0.06, 1.0)):
        short = with_memory(wanted / (1 + lacking) / 1e9)
        assert short.best.fits
        more = short.best.step.launch - roomy.best.step.launch
        assert more == pytest.approx(slowdown * FITTED.shortage * compute, rel=0.1, abs=1e-9)
        assert ("expandable_segments" in str(short.why())) == (lacking > 0)


class Lazy(Module):
    """A layer that gets its sizes from data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(WIDTH)


def test_memory_that_parameters_share_is_counted_once_of_classes_and_of_instances() -> None:
    shared, one = (planned(it, precisions=["32-true"]).best.memory for it in (Shared(), Module()))
    assert shared.parameters == planned(Shared, precisions=["32-true"]).best.memory.parameters
    assert shared.parameters < one.parameters + WIDTH * WIDTH * 2


def test_layers_without_sizes_are_refused_of_classes_and_of_instances() -> None:
    for made in (Lazy, Lazy()):
        with pytest.raises(ConfigurationError, match="get their shapes from data"):
            planned(made)


def test_buffers_are_counted_whole_on_every_rank() -> None:
    plan = planned(MemoryBank, arguments={"gib": 100}, gpu="A100-80")
    assert plan.best.memory.buffers == 100 * GIB
    assert not plan.best.fits
    assert planned(MemoryBank, arguments={"gib": 1}, gpu="A100-80").best.fits


def test_work_that_grows_with_the_square_of_samples_is_traced_itself() -> None:
    plan = planned(Contrastive, micro_batches=[65536])
    assert plan.best.memory.peak > 65536**2 * 4
    assert planned(Module, micro_batches=[65536]).best.memory.peak < GIB * 2


SIDE = 1024


class Temporary(nn.Linear):
    """A layer that makes a large tensor, and one of the batch or of each eight samples of it."""

    def __init__(self, parts: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.parts = parts

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if not self.parts:
                torch.ones(SIDE, SIDE).sum()
            for part in input.split(8 if self.parts else len(input)):
                torch.outer(part.flatten(), torch.ones(SIDE)).sum()
        return super().forward(input)


class Temporaries(Module):
    """A layer with temporary tensors."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        self.layer = Temporary(parts)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("policy", [None, Temporary])
def test_peaks_that_are_elsewhere_with_more_samples_are_planned(policy: Any, parts: bool) -> None:
    options: dict[str, Any] = {"arguments": {"parts": parts}, "precisions": ["32-true"]}
    for samples in (4, 64):
        rows = min(samples, 8) * WIDTH if parts else max(samples * WIDTH, SIDE)
        for others in ((), (128,)):
            plan = planned(
                Temporaries, micro_batches=[samples, *others], auto_wrap_policy=policy, **options
            )
            best = next(it for it in plan.plans if it.choice.micro_batch == samples)
            assert best.memory.activations + best.memory.logits == pytest.approx(
                rows * SIDE * 4, rel=0.1
            )


def test_states_of_metrics_and_other_tensors_need_no_values() -> None:
    for made in (Measured, Measured()):
        assert planned(made).best.step.total > 0


def test_examples_may_be_mappings_and_their_tokens_are_counted() -> None:
    best = planned(ByName).best
    assert best.counted == "tokens"
    assert best.tokens == 4 * 12 * 2


def test_what_has_no_tokens_is_counted_by_samples() -> None:
    plan = planned(Module)
    assert plan.best.tokens == 4 * 2
    assert "samples_per_second" in plan.best.as_json()
    assert "samples/s" in str(plan) and "tokens/s" not in str(plan)
    assert f"({WIDTH * (WIDTH + 1):,} parameters)" in str(plan)


@pytest.mark.slow
def test_dropout_of_attention_costs_no_memory() -> None:
    dropped, plain = (planned(Attending, arguments={"dropout": it}).best for it in (0.1, 0.0))
    assert dropped.memory == plain.memory
    assert dropped.step == plain.step


@pytest.mark.parametrize(
    ("option", "value"), [("length", 0), ("global_batch", -8), ("global_batch", 0)]
)
def test_sizes_below_one_are_refused(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{option} to be a whole number of at least 1"):
        planned(Module, **{option: value})


def test_precisions_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="precision='64-true': expected one of"):
        planned(Module, precisions=["64-true"])


def test_configs_of_decoders_that_are_not_known_are_refused() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9}
    wide = Dimensions.of_config({"model_type": "qwen3", "head_dim": 32, **sizes})
    assert wide.head_dim == 32
    for kind in ("bert", "falcon"):
        with pytest.raises(ConfigurationError, match=f"model_type='{kind}' is none of"):
            Dimensions.of_config({"model_type": kind, **sizes})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": "8"}, "expected whole numbers of GPUs, at least one on a node, found '8'"),
        ({"per_node": 2.0}, "found 8 GPUs at 2.0"),
        ({"gpus": True}, "found True GPUs"),
        ({"gpu": 5}, "expected gpu to be the name of a GPU, found 5"),
        ({"gpu": ""}, "GPU '' is not in the table"),
        ({"gpu_figures": [1]}, "expected gpu_figures to be figures by name"),
        ({"gpu_figures": {"memory": 80}}, "'memory' is no figure of a GPU; expected bf16_tflops"),
        ({"gpu_figures": {"bf16_tflops": "a"}}, "H100-80: bf16_tflops='a': expected a number"),
        ({"network_gbits": "fast"}, "network_gbits='fast': expected a number above 0"),
        ({"tensor_parallel_sizes": "2"}, "expected tensor_parallel_sizes to be int"),
        ({"expert_parallel_sizes": ()}, "expected at least one value of expert_parallel_sizes"),
        ({"micro_batches": [True]}, "expected micro_batches to be int, one or several, found True"),
        ({"micro_batches": [1.5]}, "found 1.5"),
        ({"strategies": [("full_shard",)]}, r"expected strategies to be str.* found \('full_shard"),
        ({"strategies": []}, "expected at least one value of strategies, found none"),
        ({"precisions": [16]}, "expected precisions to be str, one or several, found 16"),
        ({"recomputes": 1}, "expected recomputes to be str, one or several, found 1"),
        ({"inputs": {"x": 1}}, "expected inputs to be str, one or several"),
        ({"batch": 4}, "expected batch to be a function of the number of samples, found 4"),
        ({"arguments": [1]}, "expected arguments to be arguments by name"),
        ({"arguments": {"width": 1}}, "are those of a constructor.* found Module"),
        ({"calibrate": 5}, "expected calibrate to be str or Path, one or several, found 5"),
    ],
    ids=lambda it: str(it) if isinstance(it, dict) else "",
)
def test_values_of_another_kind_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_plan(Module(), **options)


@pytest.mark.parametrize(
    "one",
    [
        {"strategies": "full_shard", "recomputes": "none"},
        {"precisions": "bf16", "offloads": "none"},
        {"tensor_parallel_sizes": 1, "expert_parallel_sizes": 1, "micro_batches": 2},
    ],
    ids=str,
)
def test_one_value_may_stand_for_a_list_of_it(one: dict[str, Any]) -> None:
    several = {name: [value] for name, value in one.items()}
    assert make_plan(Module(), **one).as_json() == make_plan(Module(), **several).as_json()


def test_equal_values_to_compare_count_once() -> None:
    once: dict[str, Any] = {"micro_batches": 2, "strategies": "full_shard", "precisions": "32-true"}
    once |= {"recomputes": "none", "offloads": "none", "tensor_parallel_sizes": 1}
    twice = {name: [value, value] for name, value in once.items()}
    assert make_plan(Module(), **once).as_json() == make_plan(Module(), **twice).as_json()


class Images(nn.Module):
    """A step on float images and labels, outside of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.head = nn.Linear(8, 4)

    def training_step(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        pooled = self.features(images * self.scale).mean((2, 3))
        return nn.functional.cross_entropy(self.head(pooled), labels)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_float_inputs_are_cast_as_a_run_casts_them(precision: str) -> None:
    inputs = ["float32:B,3,8,8", "int64:B"]
    plan = make_plan(Images, gpus=2, inputs=inputs, precisions=precision, micro_batches=4)
    assert (
        plan.best.model_flops
        == make_plan(
            Images, gpus=2, inputs=inputs, precisions="32-true", micro_batches=4
        ).best.model_flops
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_inputs_are_not_cast_where_the_run_casts_none(precision: str) -> None:
    inputs = ["float32:B,3,8,8", "int64:B"]
    uncast = MixedPrecision(cast_forward_inputs=False)
    options: dict[str, Any] = {"precisions": precision, "mixed_precision": uncast}
    with pytest.raises(ConfigurationError, match="does not run without values"):
        make_plan(Images, gpus=2, inputs=inputs, **options)


class Chain(nn.Module):
    """Layers of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).tanh()

    def training_step(self, batch: Any) -> torch.Tensor:
        return self(batch).mean()


def is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def option_of(policy: Any, **options: Any) -> dict[str, Any]:
    """The strategy's options in the YAML of a plan."""
    given: dict[str, Any] = {"inputs": f"float32:B,{WIDTH}", "strategies": "full_shard", **options}
    given = {"recomputes": "none", **given}
    plan = make_plan(Chain, gpus=2, auto_wrap_policy=policy, **given)
    return yaml.safe_load(plan.yaml)["trainer"]["strategy"]["init_args"]


@pytest.mark.parametrize(
    ("policy", "written"),
    [
        (None, None),
        (nn.Linear, "torch.nn.modules.linear.Linear"),
        (["Linear", nn.Sequential], ["Linear", "torch.nn.modules.container.Sequential"]),
        (
            NamePolicy(["layers.*"]),
            {"class_path": "shardeddp.NamePolicy", "init_args": {"names": ["layers.*"]}},
        ),
        (SizePolicy(9), {"class_path": "shardeddp.SizePolicy", "init_args": {"min_numel": 9}}),
        (is_linear, f"{__name__}.is_linear"),
    ],
)
def test_the_yaml_of_a_plan_has_its_wrap_policy(policy: Any, written: Any) -> None:
    found = option_of(policy)["auto_wrap_policy"]
    assert found == written
    made = resolve_policy(policy)
    if isinstance(written, dict):
        assert vars(made) == written["init_args"]
    else:
        assert resolve_policy(found).select(Chain()) == made.select(Chain())


def test_the_yaml_of_a_plan_says_what_it_cannot_have() -> None:
    assert "auto_wrap_policy" not in option_of("auto")
    plan = make_plan(
        Chain, inputs=[f"float32:B,{WIDTH}"], auto_wrap_policy=lambda name, _: "." in name
    )
    assert "# and auto_wrap_policy: as it was given, which has no name" in plan.yaml
    assert "auto_wrap_policy:" not in plan.yaml.partition("#")[0]


@pytest.mark.parametrize(
    ("precision", "fields"),
    [
        ("bf16", {"cast_forward_inputs": False}),
        ("32-true", {"reduce_dtype": "bfloat16"}),
        ("bf16", {"reduce_dtype": "float16", "keep_fp32": ["Linear"]}),
        ("bf16-mixed", {"buffer_dtype": "bfloat16", "output_dtype": "float32"}),
    ],
)
def test_the_yaml_of_a_plan_has_its_dtypes(precision: str, fields: dict[str, Any]) -> None:
    given = {"inputs": f"bfloat16:B,{WIDTH}"} if "cast_forward_inputs" in fields else {}
    options = option_of("auto", precisions=precision, mixed_precision=fields, **given)
    made = {**fields, **({"param_dtype": "bfloat16"} if precision == "bf16" else {})}
    assert options["mixed_precision"] == {
        "class_path": "shardeddp.MixedPrecision",
        "init_args": made,
    }
    assert option_of("auto", precisions="bf16")["mixed_precision"] == "bfloat16"


def test_the_dtype_that_computes_decides_how_fast_matmuls_are() -> None:
    def peak_of(precision: str, dtype: str | None) -> float:
        inputs = f"float32:B,{WIDTH}"
        plan = make_plan(Chain, inputs=inputs, precisions=precision, mixed_precision=dtype)
        return plan.best.peak_flops

    half, full = peak_of("bf16-mixed", None), peak_of("32-true", None)
    assert half > full
    assert peak_of("32-true", "bfloat16") == peak_of("bf16-mixed", "float32") == half
    assert peak_of("32-true", "float32") == peak_of("bf16-true", "float32") == full
    with pytest.raises(UsageError, match=r"param_dtype=torch\.float64: expected"):
        peak_of("32-true", "float64")


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ((torch.ones(2, 5, dtype=torch.int64),), 5),
        ((torch.ones(2, 5, dtype=torch.int32), torch.ones(2, 7)), 5),
        ((torch.ones(2, 3, 8, 8), torch.ones(2, 20, dtype=torch.int64)), 1),
        ((torch.ones(2, 9), torch.ones(2, 20, dtype=torch.int64)), 1),
        ((torch.ones(2), torch.ones(2, 5, dtype=torch.int64)), 5),
        ({"image": torch.ones(2, 9), "labels": torch.ones(2, 20, dtype=torch.int64)}, 1),
        ((torch.ones(2, 9),), 1),
    ],
)
def test_whole_numbers_behind_features_are_no_tokens(batch: Any, tokens: int) -> None:
    assert tokens_of(batch) == tokens


class Bare(nn.Module):
    """A step without parameters, or with frozen ones."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.register_buffer("bank", torch.ones(WIDTH))
        if frozen:
            self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def training_step(self, batch: Any) -> torch.Tensor:
        return (batch * self.bank).mean()


@pytest.mark.parametrize(("frozen", "said"), [(False, "with parameters"), (True, "all is frozen")])
def test_a_model_with_nothing_to_train_is_refused(frozen: bool, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_plan(Bare(frozen), inputs=[f"float32:B,{WIDTH}"])


@pytest.mark.parametrize("given", [{"inputs": ["int64:B,S"]}, {"batch": lambda samples: samples}])
def test_inputs_beside_dimensions_are_refused(given: dict[str, Any]) -> None:
    dims = Dimensions(layers=1, width=8, heads=1, vocabulary=9)
    with pytest.raises(UsageError, match=f"{next(iter(given))} is that of a LightningModule"):
        make_plan(dims, **given)


@pytest.mark.parametrize(
    "shape", ["int64:B,\u00b2", "int64:B," + "9" * 30, "int64:B," + ",".join(["9" * 15] * 2)]
)
def test_sizes_that_are_none_are_refused(shape: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--input .*: expected"):
        make_plan(Chain, inputs=[shape])


def test_sizes_without_samples_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=f"--input float32:4,{WIDTH}: expected a B among the sizes"
    ):
        make_plan(Chain, inputs=[f"float32:4,{WIDTH}"])


class Untrained(Chain):
    """Returns what no backward can begin with."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.result = result

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch).detach() if self.result == "one without" else None


@pytest.mark.parametrize("result", ["one without", "NoneType"])
def test_a_step_without_a_backward_is_refused(result: str) -> None:
    with pytest.raises(ConfigurationError, match=f"requires a gradient .* found {result}"):
        make_plan(Untrained(result), inputs=[f"float32:B,{WIDTH}"])


class Penalized(Chain):
    """A loss with a penalty on its gradient by what ``of`` returns."""

    def __init__(self, of: str, allow_unused: bool = False) -> None:
        super().__init__()
        self.of, self.allow_unused = of, allow_unused
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any) -> torch.Tensor:
        x = batch.clone().requires_grad_() * 1 if self.of == "input" else batch.requires_grad_()
        y = self.layers(x)
        found = {"head": self.head.weight, "unit": self.layers[0].weight, "result": y}
        loss = self.head(y).pow(2).mean() + x.mean()
        (made,) = torch.autograd.grad(
            loss, found.get(self.of, x), create_graph=True, allow_unused=self.allow_unused
        )
        return loss if made is None else loss + made.pow(2).mean()


@pytest.mark.parametrize("allow_unused", [False, True])
@pytest.mark.parametrize("of", ["input", "leaf", "unit"])
def test_gradients_through_units_are_refused_in_their_own_words(
    of: str, allow_unused: bool
) -> None:
    options: dict[str, Any] = {"inputs": [f"float32:B,{WIDTH}"], "recomputes": "none"}
    model = Penalized(of, allow_unused)
    with pytest.raises(ConfigurationError, match=r"gradients .* through units, as a gradient pen"):
        planned(model, auto_wrap_policy=NamePolicy(["layers.*"]), **options)
    assert planned(model, auto_wrap_policy=None, **options).best.step.total > 0


@pytest.mark.parametrize("of", ["head", "result"])
def test_gradients_behind_units_are_planned(of: str) -> None:
    options: dict[str, Any] = {"inputs": [f"float32:B,{WIDTH}"], "recomputes": "none"}
    model = Penalized(of)
    found = planned(model, auto_wrap_policy=NamePolicy(["layers.*"]), **options)
    assert (
        found.best.model_flops == planned(model, auto_wrap_policy=None, **options).best.model_flops
    )


class Skips(Chain):
    """Trains on no batch without positive numbers."""

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch) if (batch > 0).any() else None


def test_a_step_that_skips_some_batches_is_planned_for_the_others() -> None:
    found, other = (planned(it, inputs=[f"float32:B,{WIDTH}"]).best for it in (Skips, Chain))
    assert found.model_flops == other.model_flops


def test_figures_of_a_gpu_have_names() -> None:
    figures: Any = {1: 2}
    with pytest.raises(UsageError, match="expected gpu_figures to be figures by name"):
        make_plan(Chain, inputs=[f"float32:B,{WIDTH}"], gpu_figures=figures)


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    return operation is torch.ops.aten.mm.default


@pytest.mark.parametrize(
    ("recompute", "given", "written"),
    [
        ("full", True, "auto"),
        ("full", {"modules": ["Linear"], "every": 2}, {"modules": "Linear", "every": 2}),
        ("full", False, {"modules": "torch.nn.modules.linear.Linear"}),
        (
            "selective",
            False,
            {"modules": "torch.nn.modules.linear.Linear", "save_ops": ["matmul", "attention"]},
        ),
        ("selective", {"save_ops": "mm"}, {"save_ops": "mm"}),
        ("selective", {"save_ops": [torch.ops.aten.mm]}, {"save_ops": ["aten.mm"]}),
        ("selective", {"save_ops": keep_products}, {"save_ops": f"{__name__}.keep_products"}),
    ],
)
def test_the_yaml_of_a_plan_has_what_is_recomputed(
    recompute: str, given: Any, written: Any
) -> None:
    options = option_of(nn.Linear, recomputes=recompute, activation_checkpointing=given)
    if not isinstance(written, str):
        written = {"class_path": "shardeddp.ActivationCheckpointing", "init_args": written}
    assert options["activation_checkpointing"] == written


def test_the_yaml_of_a_plan_says_which_operations_it_cannot_have() -> None:
    plan = make_plan(
        Chain,
        inputs=[f"float32:B,{WIDTH}"],
        auto_wrap_policy=nn.Linear,
        recomputes="selective",
        activation_checkpointing={"save_ops": lambda *_, **__: True},
    )
    assert "# and activation_checkpointing: as it was given, which has no name" in plan.yaml


@pytest.mark.parametrize(
    ("save_ops", "written"),
    [
        (torch.ops.aten.addmm, "save_ops: - aten.addmm"),
        (torch.ops.aten.addmm.default, "save_ops: - aten.addmm.default"),
        (partial(lambda *_, **__: True), "as it was given, which has no name"),
    ],
)
def test_the_yaml_of_a_plan_has_operations_by_their_names(save_ops: Any, written: str) -> None:
    plan = make_plan(
        Chain,
        inputs=[f"float32:B,{WIDTH}"],
        auto_wrap_policy=nn.Linear,
        recomputes="selective",
        activation_checkpointing={"save_ops": save_ops},
    )
    assert written in " ".join(plan.yaml.split())


def test_every_second_unit_takes_half_of_the_matmuls_to_recompute() -> None:
    def planned(**given: Any) -> tuple[float, float]:
        plan = make_plan(
            Chains,
            inputs=[f"float32:B,{WIDTH}"],
            auto_wrap_policy=Chain,
            recomputes="selective" if "save_ops" in given else "full",
            strategies="no_shard",
            micro_batches=4,
            activation_checkpointing={"modules": Chain, **given},
        )
        return plan.best.task.setting.recomputes[0], plan.best.step.recompute

    every, second, none, cheap = (
        planned(),
        planned(every=2),
        planned(save_ops="matmul", every=2),
        planned(save_ops="tanh"),
    )
    assert [it[0] for it in (every, second, none, cheap)] == [1, 0.5, 0, 1]
    assert every[1] > second[1] > none[1] > 0
    assert every[1] > cheap[1]


class Chains(nn.Module):
    """Four chains, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.chains = nn.ModuleList([Chain() for _ in range(4)])

    def training_step(self, batch: Any) -> torch.Tensor:
        for chain in self.chains:
            batch = chain(batch)
        return batch.mean()


class Gate(nn.Module):
    """A layer whose loss beside its result goes elsewhere."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.layer, self.kept, self.loss = nn.Linear(WIDTH, WIDTH), kept, torch.zeros(())
        self.last = torch.zeros(())

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        """The layer's result, which an attribute may keep as well."""
        out = self.layer(x)
        if self.kept == "attribute":
            self.loss = out.mean()
        elif self.kept == "argument":
            losses.append(out.mean())
        elif self.kept == "detached":
            self.loss = out.mean().detach()
        self.last = out
        return out


class Gates(Module):
    """Layers with losses of their own."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Gate(kept) for _ in range(2))  # type: ignore[assignment]

    def training_step(self, batch: Any) -> Any:
        """The sum of all losses."""
        losses: list[torch.Tensor] = []
        for it in self.layer:  # type: ignore[attr-defined]
            batch = it(batch, losses)
        return sum(losses, batch.mean()) + sum(it.loss for it in self.layer)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kept", "recomputes", "is_named"),
    [
        ("attribute", ("none", "full"), True),
        ("argument", ("full",), True),
        ("attribute", ("none",), False),
        ("detached", ("full",), False),
        ("nowhere", ("full",), False),
    ],
)
def test_graphs_that_leave_recomputed_units_beside_their_results_are_named(
    kept: str, recomputes: tuple[str, ...], is_named: bool
) -> None:
    plan = make_plan(
        Gates(kept),
        recomputes=recomputes,
        auto_wrap_policy=NamePolicy(["layer.*"]),
        micro_batches=(1,),
    )
    said = "The plan does not know further gathers of recomputed units for tensors with a graph"
    assert (said in str(plan)) is is_named
    assert ("(layer.0" in "".join(plan.unplanned)) is is_named
