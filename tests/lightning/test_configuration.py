"""Every option is explained by `--help`, survives `--print_config`, says what it expected, and is documented."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from docs.options import GROUPS, PAGE, SET_BY_THE_TRAINER, written
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import shardeddp
from shardeddp import (
    ActivationCheckpointing,
    CheckpointOptions,
    CPUOffload,
    MixedPrecision,
    ShardedDP,
)
from shardeddp.config import AUTO, choose_sharding, option_names, parse_options
from shardeddp.lightning.api import ParallelStrategy
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES
from support.command_line import STRATEGY, printed, refusal, strategy_of, write
from support.tasks import TinyGpt

SIGNATURE = {
    name: parameter
    for name, parameter in inspect.signature(ShardedDP).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD  # arguments of other strategies, refused
}

pytestmark = pytest.mark.timeout(60)


# -- help


def meanings(documented: type) -> dict[str, str]:
    """The first clause that is said about each argument."""
    found = re.findall(r"^    (\w+): (.*)$", inspect.getdoc(documented) or "", re.MULTILINE)
    return {name: re.split(r"[:;,.]", meaning)[0] for name, meaning in found}


def test_help_shows_every_argument_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"\s+", " ", printed(capsys, f"{STRATEGY}.help=shardeddp.ShardedDP"))
    said = meanings(ShardedDP)
    assert list(said) == list(SIGNATURE)
    for name, meaning in said.items():
        assert re.search(rf" {STRATEGY}\.{name}[ .]", text), name
        assert meaning in text, f"{name}: {meaning}"
    assert all(
        f"{STRATEGY}.checkpoint_options.{name} " in text for name in meanings(CheckpointOptions)
    )


@pytest.mark.parametrize(
    ("flag", "group"),
    [
        ("mixed_precision.help", MixedPrecision),
        ("cpu_offload.help", CPUOffload),
        (
            "activation_checkpointing.help=shardeddp.ActivationCheckpointing",
            ActivationCheckpointing,
        ),
    ],
)
def test_help_of_a_group_shows_its_fields_with_their_meaning(
    capsys: pytest.CaptureFixture[str], flag: str, group: type
) -> None:
    shown = printed(capsys, f"{STRATEGY}.help=shardeddp.ShardedDP", f"{STRATEGY}.{flag}")
    text = re.sub(r"\s+", " ", shown)
    said = meanings(group)
    assert list(said) == [field.name for field in dataclasses.fields(group)]
    for name, meaning in said.items():
        assert f"{flag.partition('.')[0]}.{name} " in text, name
        assert meaning in text, f"{name}: {meaning}"


# -- the options and the signature that they are given in


def test_the_signature_has_the_options_with_their_defaults() -> None:
    options = option_names()
    of_lightning = inspect.signature(ParallelStrategy).parameters
    assert options == [
        it for it in SIGNATURE if it not in of_lightning and it != "precision_plugin"
    ]
    # The strategy hands on what differs from its signature, so both have to have the same defaults.
    defaults = {name: SIGNATURE[name].default for name in options}
    assert vars(parse_options(defaults)) == vars(parse_options({}))


def test_options_are_compared_by_how_they_shard() -> None:
    blocks = parse_options({"auto_wrap_policy": ["Block"]})
    assert parse_options({"timeout": 1, "auto_wrap_policy": ("Block",)}).shards_like(blocks)
    zero2 = parse_options({"sharding_strategy": "zero2"})
    assert zero2.shards_like(parse_options({"reshard_after_forward": False}))
    plan = {"up": ColwiseParallel()}, {"up": ColwiseParallel()}, {"up": RowwiseParallel()}
    split = [{"tensor_parallel_size": 2, "tensor_parallel_plan": it} for it in plan]
    found = [*map(parse_options, split)]
    assert found[0].shards_like(found[1])
    assert not found[0].shards_like(found[2])
    assert not parse_options({"auto_wrap_policy": ["Layer"]}).shards_like(blocks)
    hybrid = parse_options({"sharding_strategy": "HYBRID_SHARD_ZERO2"})
    again = hybrid.with_sharding("hybrid_shard", None)
    assert again.sharding == choose_sharding("hybrid_shard", reshard_after_forward=False)


def test_a_strategy_that_auto_has_chosen_makes_the_options_that_name_it() -> None:
    asked = {"reshard_after_forward": False, "timeout": 1}
    auto = parse_options({"sharding_strategy": "Auto", **asked})
    assert list(auto.candidates) == ["full_shard", "hybrid_shard", "shard_grad_op"]
    for name in auto.candidates:
        named = parse_options({"sharding_strategy": name, **asked})
        assert vars(auto.with_sharding(name, None)) == vars(named)


# -- configurations

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {
        "sharding_strategy": "hybrid_shard",
        "shard_size": 2,
        "auto_wrap_policy": ["support.tasks.Block", "LayerNorm"],
        "mixed_precision": {
            "param_dtype": "torch.bfloat16",
            "reduce_dtype": "fp32",
            "output_dtype": "float32",
            "buffer_dtype": "fp32",
            "cast_forward_inputs": False,
            "keep_fp32": ["torch.nn.LayerNorm", "Router"],
        },
        "activation_checkpointing": {
            "modules": {"class_path": "shardeddp.NamePolicy", "init_args": {"names": ["blocks.*"]}},
            "every": 2,
            "save_ops": ["matmul", "aten.mm"],
            "cpu_offload": True,
        },
        "cpu_offload": {"params": True, "optimizer": False},
        "reshard_after_forward": 2,
        "optimizer_shard": "world",
        "optimizer_scope": {"Lion": "element"},
        "forward_prefetch": 0,
        "backward_prefetch": 2,
        "reduce_every_backward": False,
        "uneven_batches": "min",
        "uneven_units": True,
        "state_dict_type": "full",
        "checkpoint_options": {
            "max_file_gb": 8.0,
            "asynchronous": True,
            "durability": "process",
            "permissions": "umask",
            "zip_crc": False,
            "cast": True,
            "foreign": True,
            "trust_pickle": True,
            "timeout": 120.0,
        },
        "process_group_backend": "gloo",
        "timeout": 30.0,
        "debug": True,
        "start_method": "spawn",
        "cluster_environment": {
            "class_path": "lightning.pytorch.plugins.environments.LightningEnvironment"
        },
        "checkpoint_io": {"class_path": "lightning.pytorch.plugins.TorchCheckpointIO"},
    },
    {
        "sharding_strategy": "shard_grad_op",
        "timeout": "0:10:00",
        "auto_wrap_policy": {
            "class_path": "shardeddp.SizePolicy",
            "init_args": {"min_numel": 1000},
        },
        "mixed_precision": "bf16",
        "activation_checkpointing": ["support.tasks.Block"],
        "cpu_offload": True,
        "reshard_after_forward": True,
        "backward_prefetch": 0,
    },
    {
        "auto_wrap_policy": None,
        "activation_checkpointing": {
            "class_path": "shardeddp.ClassPolicy",
            "init_args": {"classes": ["Block"]},
        },
    },
    {
        "activation_checkpointing": {
            "modules": ["Block"],
            "every": 1,
            "save_ops": "attention",
            "cpu_offload": False,
        },
        "optimizer_scope": None,
    },
    {"tensor_parallel_size": 2, "tensor_parallel_plan": {"blocks.*.up": "colwise"}},
    {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"},
    {"expert_parallel_size": 2, "experts": "model.layers.*.experts"},
    {"expert_parallel_size": 2, "experts": ["torch.nn.Bilinear", "torch.nn.Linear"]},
    {"sharding_strategy": "auto", "plan_only": "A100-80"},
]


def described(strategy: ShardedDP) -> dict[str, str]:
    """All that a strategy has been told, and what modules of a model it takes."""
    shown = {
        f"{type(it).__name__}.{name}": str(value)
        for it in (strategy, strategy.options)
        for name, value in vars(it).items()
    }
    recomputed = strategy.options.activation_checkpointing
    return {name: text for name, text in shown.items() if " object at " not in text} | {
        "units": str(strategy.options.auto_wrap_policy.select(TinyGpt())),
        "recomputed": "" if recomputed is None else str(recomputed.modules.select(TinyGpt())),
        "environment": type(strategy.cluster_environment).__name__,
    }


@pytest.mark.slow
@pytest.mark.parametrize("init_args", CONFIGURATIONS)
def test_the_printed_configuration_makes_the_same_strategy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, init_args: dict[str, Any]
) -> None:
    first = write(tmp_path, init_args)
    configuration = printed(capsys, first, "--print_config")
    before = described(strategy_of(first))
    again = tmp_path / "printed.yaml"
    again.write_text(configuration)
    assert printed(capsys, f"--config={again}", "--print_config") == configuration
    assert described(strategy_of(f"--config={again}")) == before
    written = yaml.safe_load(configuration)["trainer"]["strategy"]["init_args"]
    assert {name: written[name] for name in init_args} == init_args


def test_every_option_and_every_field_was_among_them() -> None:
    assert {name for written in CONFIGURATIONS for name in written} == set(
        SIGNATURE
    ) - SET_BY_THE_TRAINER
    for option, group in GROUPS.items():
        fields = {field.name for field in dataclasses.fields(group)}
        assert any(set(written.get(option) or ()) == fields for written in CONFIGURATIONS), option


# -- errors

WRONG: list[tuple[str, Any, list[str]]] = [
    ("sharding_strategy", "ful_shard", [*SHARDING_STRATEGIES, "did you mean 'full_shard'"]),
    ("shard_size", "two", ["int", "two"]),
    ("auto_wrap_policy", "bloks.*", ["NamePolicy"]),
    ("auto_wrap_policy", 3, ["Policy", "str"]),
    ("mixed_precision", "bf17", ["bf17", "bfloat16", "float16"]),
    ("mixed_precision", {"param_dtyp": "bf16"}, ["param_dtyp"]),
    ("activation_checkpointing", {"evry": 2}, ["evry", "every"]),
    ("activation_checkpointing", {"every": 0}, ["every", "found 0"]),
    ("activation_checkpointing", {"save_ops": ["matmull"]}, ["matmul", "attention"]),
    ("cpu_offload", {"parms": True}, ["parms"]),
    ("reshard_after_forward", 1, ["True, False", "at least 2"]),
    ("optimizer_shard", "node", ["group", "world", "node"]),
    ("optimizer_scope", {"Lion": "elements"}, ["element", "parameter", "model"]),
    ("tensor_parallel_plan", {"up": "colwize"}, ["colwize", "did you mean 'colwise'"]),
    ("forward_prefetch", -1, ["0 (none)"]),
    ("backward_prefetch", "all", ["int", "all"]),
    ("reduce_every_backward", "sometimes", ["bool", "sometimes"]),
    ("state_dict_type", "shards", ["auto", "sharded", "full", "shards"]),
    ("checkpoint_options", {"async": True}, ["async"]),
    ("checkpoint_options", {"durability": "tape"}, ["durability", "disk", "process", "tape"]),
    ("checkpoint_options", {"max_file_gb": -1}, ["max_file_gb", "-1", "0 for no single files"]),
    ("checkpoint_options", {"timeout": 0}, ["timeout", "positive number of seconds"]),
    ("process_group_backend", "glo", ["gloo", "nccl", "'glo'"]),
    ("timeout", "soon", ["h:m:s", "soon"]),
    ("timeout", -5, ["positive number of seconds"]),
    ("plan_only", "H1000", ["H1000", "A100-80", "did you mean H100"]),
    ("start_method", "thread", ["popen", "spawn", "fork", "thread"]),
    ("shardsize", 2, ["shardsize"]),
]


@pytest.mark.parametrize(("option", "value", "words"), WRONG)
def test_a_wrong_value_is_refused_with_the_name_of_its_option_and_what_was_expected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, value: Any, words: list[str]
) -> None:
    message = refusal(capsys, write(tmp_path, {option: value}))
    assert option in message or GROUPS[option].__name__ in message
    assert [word for word in words if word not in message] == []


def test_an_unknown_option_is_named_on_the_command_line_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "shardsize" in refusal(
        capsys, f"{STRATEGY}=shardeddp.ShardedDP", f"{STRATEGY}.shardsize=2"
    )


# -- documentation


def rows(title: str) -> dict[str, list[str]]:
    """The cells of the table under a heading of the document, by the option in the first of them."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in cells}


def test_the_tables_of_the_document_are_the_descriptions_in_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run `python docs/options.py`"
    assert [*rows("All options")] == [it for it in SIGNATURE if it not in SET_BY_THE_TRAINER]
    for option, group in GROUPS.items():
        assert [*rows(option)] == [field.name for field in dataclasses.fields(group)]


def choices(annotation: Any) -> set[str]:
    """Everything that a Literal in a type allows."""
    inner = get_args(annotation)
    return (
        {str(it) for it in inner}
        if get_origin(annotation) is Literal
        else set().union(*map(choices, inner), set())
    )


def test_the_document_lists_the_choices_of_every_option() -> None:
    table, hints = rows("All options"), get_type_hints(ShardedDP.__init__)
    expected = {name: choices(hints[name]) for name in table}
    assert expected["sharding_strategy"] == {*SHARDING_STRATEGIES, AUTO}
    assert sum(map(len, expected.values())) > 10
    for name, wanted in expected.items():
        assert wanted <= set(re.findall(r"`(\w+)`", table[name][1])), name


def test_the_document_lists_every_policy() -> None:
    known = {
        name
        for name in shardeddp.__all__
        if name.endswith("Policy") and name not in ("Policy", "PredicatePolicy")
    }
    assert {name.removeprefix("shardeddp.") for name in rows("auto_wrap_policy")} == known
