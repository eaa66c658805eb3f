"""Files of other strategies are read as data, and say what to write and what is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardeddp import ConfigurationError, ShardedDP
from shardeddp.migrate import Migrated, migrate, report


def migrated(tmp_path: Path, name: str, text: str) -> Migrated:
    (tmp_path / name).write_text(text)
    [found] = migrate(tmp_path / name)
    return found


def options(found: Migrated) -> dict[str, Any]:
    """Of the YAML that is printed; they are those that ShardedDP takes."""
    chosen = yaml.safe_load(found.text)["trainer"]["strategy"]
    assert chosen["class_path"] == "shardeddp.ShardedDP"
    given = chosen.get("init_args", {})
    if not isinstance(given.get("auto_wrap_policy"), dict):
        ShardedDP(**given)
    return given


FSDP = """
import torch
import lightning as L
from functools import partial
from lightning.pytorch.strategies import FSDPStrategy as Strategy
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
policy = partial(size_based_auto_wrap_policy, min_num_params=1000)
more = dict(use_orig_params=True)
strategy = Strategy(
    auto_wrap_policy=policy,
    sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
    device_mesh=(2, 4),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    cpu_offload=True,
    **more,
)
raise SystemExit("nothing here is run")
"""


def test_a_python_file(tmp_path: Path) -> None:
    found = migrated(tmp_path, "train.py", FSDP)
    assert found.location.endswith("train.py:9")
    assert found.text.splitlines() == [
        "from shardeddp import MixedPrecision, ShardedDP, SizePolicy",
        'strategy=ShardedDP("hybrid_shard", auto_wrap_policy=SizePolicy(min_numel=1000), '
        'reshard_after_forward=False, mixed_precision=MixedPrecision(param_dtype="bfloat16", '
        'reduce_dtype="bfloat16"), cpu_offload=True, shard_size=4)',
    ]
    assert not found.translation.loses
    assert "timeout" in [note.key for note in found.translation.notes]
    assert "use_orig_params" in found.translation.unneeded


@pytest.mark.parametrize(
    "text",
    [
        "from lightning.fabric.strategies import FSDPStrategy as F\ns = F()\n",
        "import lightning.fabric.strategies as S\ns = S.FSDPStrategy()\n",
        "from lightning_fabric import strategies\ns = strategies.FSDPStrategy()\n",
        'from lightning.fabric import Fabric\nfabric = Fabric(strategy="fsdp")\n',
        'import lightning as L\nfabric = L.Fabric(devices=8, strategy="fsdp")\n',
    ],
)
def test_fabric_gets_the_strategy_of_fabric(tmp_path: Path, text: str) -> None:
    found = migrated(tmp_path, "train.py", text)
    assert found.text.splitlines()[0] == "from shardeddp.fabric import ShardedDP"


def test_what_a_subclass_changes_is_lost(tmp_path: Path) -> None:
    text = "import lightning.pytorch.strategies as S\nclass Mine(S.FSDPStrategy): ...\n"
    found = migrated(tmp_path, "train.py", text)
    assert found.location.endswith("train.py:2")
    assert found.was == "class Mine(S.FSDPStrategy)"
    assert found.translation.loses


def test_what_only_the_program_knows_is_lost(tmp_path: Path) -> None:
    found = migrated(tmp_path, "train.py", "FSDPStrategy(ignored_modules=[x], **options())")
    assert {note.key for note in found.translation.notes if note.lost} == {
        "ignored_modules",
        "**options()",
    }
    assert "# LOST     ignored_modules: " in report([found])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("fsdp", {"sharding_strategy": "full_shard"}),
        ("fsdp_cpu_offload", {"sharding_strategy": "full_shard", "cpu_offload": True}),
        ("deepspeed_stage_1", {"sharding_strategy": "shard_optimizer"}),
        ("deepspeed_stage_2", {"sharding_strategy": "shard_grad_op"}),
        (
            "deepspeed_stage_2_offload",
            {"sharding_strategy": "shard_grad_op", "cpu_offload": {"optimizer": True}},
        ),
        ("deepspeed_stage_3_offload", {"sharding_strategy": "full_shard", "cpu_offload": True}),
        ("ddp_spawn", {"sharding_strategy": "no_shard", "start_method": "spawn"}),
    ],
)
def test_names_of_strategies(tmp_path: Path, word: str, expected: dict[str, Any]) -> None:
    found = migrated(tmp_path, "config.yaml", f"trainer: {{strategy: {word}}}")
    assert options(found) == expected
    assert found.text != migrated(tmp_path, "train.py", f"Trainer(strategy={word!r})").text


def test_a_mapping_of_arguments_of_the_trainer(tmp_path: Path) -> None:
    text = 'LightningCLI(M, trainer_defaults={**more, "devices": 2, "strategy": "ddp"})'
    assert migrated(tmp_path, "a.py", text).text.endswith('strategy=ShardedDP("no_shard")')


@pytest.mark.parametrize(("said", "stage"), [(True, 1), (False, 0)])
def test_a_bool_in_a_configuration_of_deepspeed_is_a_stage(
    tmp_path: Path, said: bool, stage: int
) -> None:
    found, same = (
        migrated(tmp_path, "a.json", json.dumps({"train_batch_size": 8, "zero_optimization": it}))
        for it in (said, {"stage": stage})
    )
    assert found.text == same.text
    assert said is not ("zero_optimization" in found.translation.unneeded)


def test_each_value_that_is_refused_is_lost_also_beside_what_has_no_counterpart(
    tmp_path: Path,
) -> None:
    text = "strategy: {class_path: shardeddp.ShardedDP, init_args: {%s}}"
    given = "shard_size: two, timeout: -1, sharding_strategy: full, wait: 3"
    found = migrated(tmp_path, "a.yaml", text % given)
    assert lost(found) == ["sharding_strategy", "wait", "ShardedDP", "ShardedDP"]
    said = [note.text for note in found.translation.notes if note.key == "ShardedDP"]
    assert "timeout=-1" in said[0] and "shard_size=two" in said[1]


def test_nvme_is_lost(tmp_path: Path) -> None:
    found = migrated(tmp_path, "config.yaml", "strategy: deepspeed_stage_3_offload_nvme")
    assert found.translation.loses


CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8, "overlap_comm": True},
}


def test_a_configuration_of_deepspeed(tmp_path: Path) -> None:
    found = migrated(tmp_path, "ds.json", json.dumps(CONFIG))
    assert options(found) == {"sharding_strategy": "full_shard", "reshard_after_forward": 8}
    trainer = yaml.safe_load(found.text)["trainer"]
    assert (trainer["precision"], trainer["gradient_clip_val"]) == ("bf16-mixed", 0.5)
    said = {note.key: note.text for note in found.translation.notes}
    assert "hpZ" in said["config.zero_optimization.zero_hpz_partition_size"]
    assert "float32 master weights" in said["precision"]
    assert not found.translation.loses


@pytest.mark.parametrize(
    ("config", "key", "lost"),
    [
        ({"gradient_clipping": "auto"}, "gradient_clipping", False),
        ({"train_batch_size": "auto"}, "train_batch_size", False),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled", False),
        ({"gradient_clipping": "0.5"}, "gradient_clipping", True),
        ({"fp16": True}, "fp16", True),
        ({"activation_checkpointing": True}, "activation_checkpointing", True),
        (
            {"zero_optimization": {"mics_shard_size": "8"}},
            "zero_optimization.mics_shard_size",
            True,
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "disk"}}},
            "zero_optimization.offload_param",
            True,
        ),
    ],
)
def test_a_key_of_deepspeed_that_is_filled_in_elsewhere_or_wrong_has_a_line(
    tmp_path: Path, config: dict[str, Any], key: str, lost: bool
) -> None:
    config = {"zero_optimization": {}, **config}
    found = migrated(tmp_path, "ds.json", json.dumps(config)).translation
    assert [note.lost for note in found.notes if note.key == f"config.{key}"] == [lost]
    assert found.options.keys() | found.trainer.keys() == {"sharding_strategy"}


def test_what_deepspeed_makes_of_its_configuration_is_written_out(tmp_path: Path) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": "auto"}}
    found = migrated(tmp_path, "ds.json", json.dumps({**CONFIG, "optimizer": adam}))
    said = {note.key: note.text for note in found.translation.notes}
    assert "DataLoader(batch_size=4)" in said["config.train_micro_batch_size_per_gpu"]
    line = "torch.optim.AdamW(self.parameters(), lr=0.0001, betas=[0.9, 0.95])"
    assert said["config.optimizer"].endswith(line)
    for other in ({"type": "Lion"}, {"type": "Adam", "params": {"adam_w_mode": False}}):
        found = migrated(tmp_path, "ds.json", json.dumps({**CONFIG, "optimizer": other}))
        said = {note.key: note.text for note in found.translation.notes}
        assert said["config.optimizer"].endswith("configure_optimizers() returns it")


def test_a_configuration_that_a_strategy_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    entry = (
        "{class_path: lightning.pytorch.strategies.DeepSpeedStrategy, init_args: {config: ds.json}}"
    )
    found = migrated(tmp_path, "config.yaml", f"trainer: {{strategy: {entry}}}")
    assert options(found)["reshard_after_forward"] == 8


def test_model_parallel_without_tensor_parallel(tmp_path: Path) -> None:
    text = "ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)"
    assert not migrated(tmp_path, "a.py", text).translation.loses
    assert migrated(tmp_path, "a.py", "ModelParallelStrategy()").translation.loses


ACCELERATE = """
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,Other
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_sharding_strategy: 2
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 2
num_processes: 16
machine_rank: 0
"""


def test_a_configuration_of_accelerate(tmp_path: Path) -> None:
    found = migrated(tmp_path, "accelerate.yaml", ACCELERATE)
    assert options(found) == {
        "sharding_strategy": "shard_grad_op",
        "auto_wrap_policy": ["LlamaDecoderLayer", "Other"],
        "cpu_offload": True,
        "state_dict_type": "sharded",
    }
    trainer = yaml.safe_load(found.text)["trainer"]
    assert (trainer["num_nodes"], trainer["devices"], trainer["precision"]) == (2, 8, "bf16-mixed")
    assert not found.translation.loses


def test_a_configuration_of_accelerate_for_fsdp2(tmp_path: Path) -> None:
    text = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_auto_wrap_policy: SIZE_BASED_WRAP,
  fsdp_min_num_params: 5}
"""
    assert options(migrated(tmp_path, "a.yaml", text)) == {
        "sharding_strategy": "full_shard",
        "auto_wrap_policy": {"class_path": "shardeddp.SizePolicy", "init_args": {"min_numel": 5}},
    }


def test_a_configuration_of_accelerate_for_deepspeed(tmp_path: Path) -> None:
    text = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu, offload_param_device: none,
  gradient_accumulation_steps: 4, zero3_init_flag: false}
"""
    found = migrated(tmp_path, "a.yaml", text)
    assert options(found) == {
        "sharding_strategy": "shard_grad_op",
        "cpu_offload": {"optimizer": True},
    }
    assert yaml.safe_load(found.text)["trainer"]["accumulate_grad_batches"] == 4


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp_shard": 8, "tp": 2}, {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"}),
        (
            {"dp_replicate": 2, "dp_shard": 4},
            {"sharding_strategy": "hybrid_shard", "shard_size": 4},
        ),
        ({"dp_replicate": 8, "dp_shard": 1}, {"sharding_strategy": "no_shard"}),
    ],
)
def test_the_axes_of_accelerate(
    sizes: dict[str, int], expected: dict[str, Any], tmp_path: Path
) -> None:
    axes = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    text = yaml.safe_dump({**config, "parallelism_config": axes})
    found = migrated(tmp_path, "a.yaml", text)
    assert not found.translation.loses
    assert options(found) == {
        **options(migrated(tmp_path, "b.yaml", yaml.safe_dump(config))),
        **expected,
    }
    axes["parallelism_config_cp_size"] = 2
    lost = migrated(tmp_path, "c.yaml", yaml.safe_dump({**config, "parallelism_config": axes}))
    assert [it.key for it in lost.translation.notes if it.lost] == ["parallelism_config_cp_size"]


def test_words_of_others_in_a_file_for_shardeddp(tmp_path: Path) -> None:
    text = """
trainer:
  strategy:
    class_path: shardeddp.ShardedDP
    init_args: {sharding_strategy: HYBRID_SHARD, use_orig_params: true, device_mesh: [2, 4]}
"""
    assert options(migrated(tmp_path, "a.yaml", text)) == {
        "sharding_strategy": "hybrid_shard",
        "shard_size": 4,
    }


def test_misspelt_options_in_a_file_for_shardeddp_are_lost_and_the_nearest_is_named(
    tmp_path: Path,
) -> None:
    text = """
trainer:
  strategy:
    class_path: shardeddp.ShardedDP
    init_args:
      sharding_strategy: hybird_shard
      shard_sise: 2
      cpu_offload: {optimiser: true}
      mixed_precision:
        class_path: shardeddp.MixedPrecision
        init_args: {param_dtyp: bf16, keep_fp32: [Norm]}
      cluster_environment: {class_path: LightningEnvironment}
"""
    found = migrated(tmp_path, "a.yaml", text)
    said = {note.key: note.text for note in found.translation.notes if note.lost}
    assert said.pop("sharding_strategy").endswith("did you mean HYBRID_SHARD?")
    assert said == {
        "shard_sise": "not known; did you mean shard_size?",
        "cpu_offload.optimiser": "not known; did you mean optimizer?",
        "mixed_precision.param_dtyp": "not known; did you mean param_dtype?",
    }


def lost(found: Migrated) -> list[str]:
    return [note.key for note in found.translation.notes if note.lost]


BOUND_AGAIN = (
    "x |= 1", "x: int = 1", "x, y = 1, 2", "for x in y: ...", "with y as x: ...", "(x := 1)", "import x",
    "from y import x", "def x(): ...", "def f(x): ...", "def f():\n  x = 1", "del x",
    "try: ...\nexcept E as x: ...", "[x for x in y]", "match y:\n  case {**x}: ...",
)  # fmt: skip


@pytest.mark.parametrize("text", BOUND_AGAIN)
def test_a_name_that_is_bound_again_in_any_way_is_not_read(tmp_path: Path, text: str) -> None:
    file = f"x = 'NO_SHARD'\n{text}\nFSDPStrategy(sharding_strategy=x)"
    assert lost(migrated(tmp_path, "a.py", file)) == ["sharding_strategy"]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("x = 'NO_SHARD'\ndef f(): FSDPStrategy(sharding_strategy=x)", True),
        ("def f():\n  x = 'NO_SHARD'\n  FSDPStrategy(sharding_strategy=x)", True),
        ("def f():\n  x = 'NO_SHARD'\ndef g(): FSDPStrategy(sharding_strategy=x)", False),
        ("class A:\n  x = 'NO_SHARD'\n  def g(self): FSDPStrategy(sharding_strategy=x)", False),
        ("x = x\nFSDPStrategy(sharding_strategy=x)", False),
        ("FSDPStrategy(sharding_strategy=args.fsdp)", False),
        ("FSDPStrategy(sharding_strategy=fsdp.ShardingStrategy.NO_SHARD)", True),
        ("S = FSDPStrategy\nS(sharding_strategy='NO_SHARD')", True),
    ],
)
def test_a_value_is_read_where_the_file_is_certain_of_it(
    tmp_path: Path, text: str, read: bool
) -> None:
    found = migrated(tmp_path, "a.py", text)
    assert lost(found) == ([] if read else ["sharding_strategy"])
    assert ("no_shard" in found.text) is read


@pytest.mark.parametrize("change", ["kw['a'] = 1", "kw.update(a=1)", "del kw['a']", "f(kw)", ""])
def test_a_mapping_that_may_be_changed_is_not_read(tmp_path: Path, change: str) -> None:
    found = migrated(
        tmp_path, "a.py", f"kw = {{'cpu_offload': True}}\n{change}\nFSDPStrategy(**kw)"
    )
    assert lost(found) == (["**kw"] if change else [])


@pytest.mark.parametrize(
    ("call", "expected", "lost_keys"),
    [
        ("FSDPStrategy(*args)", "", ["*args"]),
        ("FSDPStrategy(**{1: 2})", "", ["**{1: 2}"]),
        ("partial(FSDPStrategy, cpu_offload=True)", "cpu_offload=True", ["partial"]),
        (
            "FSDPStrategy(mixed_precision=MixedPrecision(torch.float16, torch.float32))",
            'mixed_precision=MixedPrecision(param_dtype="float16", reduce_dtype="float32")',
            [],
        ),
        (
            "FSDPStrategy(mixed_precision=MixedPrecision(**kw))",
            "mixed_precision=MixedPrecision(**kw)",
            [],
        ),
        ("FSDPStrategy(cpu_offload=CPUOffload(**kw))", "cpu_offload=CPUOffload(**kw)", []),
        ("FSDPStrategy(cpu_offload=CPUOffload(args.off))", "cpu_offload=args.off", []),
        ("FSDPStrategy(auto_wrap_policy=partial(f, a=1))", "auto_wrap_policy=partial(f, a=1)", []),
        ("FSDPStrategy(timeout=timedelta(minutes=30))", "timeout=1800.0", []),
        ("FSDPStrategy(cpu_offload='yes')", 'cpu_offload="yes"', ["ShardedDP"]),
        (
            "FSDPStrategy(device_mesh=(2, 4), sharding_strategy='SHARD_GRAD_OP')",
            '"shard_grad_op"',
            ["device_mesh"],
        ),
        ("DeepSpeedStrategy(config={'zero_optimization': {'stage': 3}}, stage=2)", "", []),
        ("DeepSpeedStrategy(config={}, stage=2)", '"no_shard"', []),
        ("DeepSpeedStrategy(zero_optimization=False, stage=2)", '"no_shard"', []),
        ("DDPStrategy(*[], 1, 2)", '"no_shard"', ["*[]", "1", "2"]),
        ("DDPStrategy(1, 2, 3, 4, 5, 6)", "", ["5", "6"]),
    ],
)
def test_calls_in_python(tmp_path: Path, call: str, expected: str, lost_keys: list[str]) -> None:
    found = migrated(tmp_path, "a.py", call)
    assert f"ShardedDP({expected}" in found.text if lost_keys != ["5", "6"] else found.text
    assert lost(found) == lost_keys
    assert "*" not in expected or any("passed on" in it.text for it in found.translation.notes)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("S = 'deepspeed_stage_3'\nL.Trainer(strategy=S)", []),
        ("Fabric('auto', 'fsdp')", []),
        ("L.Trainer(strategy=cfg.s or 'ddp')", ["strategy"]),
        ("L.Trainer(strategy='ddp' if a else 'fsdp')", ["strategy"]),
        ("L.Trainer(strategy=f'fsdp{a}')", ["strategy"]),
        ("def f(s='ddp'): L.Trainer(strategy=s)", ["strategy"]),
        ("L.Trainer(strategy='fsdp_native')", ["strategy"]),
        ("s = FSDPStrategy()\nL.Trainer(strategy=s)", []),
    ],
)
def test_a_strategy_of_a_trainer_is_followed_or_lost(
    tmp_path: Path, text: str, keys: list[str]
) -> None:
    assert lost(migrated(tmp_path, "a.py", text)) == keys


@pytest.mark.parametrize(
    ("inner", "keys"),
    [
        ({"fp16": {"enabled": True, "auto_cast": True, "foo": 1}}, ["fp16.auto_cast", "fp16.foo"]),
        ({"fp16": {"enabled": True, "loss_scale": []}}, ["fp16.loss_scale"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["bf16.enabled"]),
        ({"fp16": {"enabled": "true"}}, ["fp16.enabled"]),
        ({"optimizer": {"type": "AdamW", "params": "foo"}}, ["optimizer"]),
        ({"flops_profiler": {"enabled": False, "profile_step": 1}}, []),
        ({"flops_profiler": {"enabled": True}}, ["flops_profiler"]),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5, "foo": 1}}},
            [
                "zero_optimization.offload_optimizer.ratio",
                "zero_optimization.offload_optimizer.foo",
            ],
        ),
        ({"zero_optimization": {"offload_param": {"device": "none", "pin_memory": True}}}, []),
    ],
)
def test_no_key_of_deepspeed_vanishes(
    tmp_path: Path, inner: dict[str, Any], keys: list[str]
) -> None:
    found = migrated(tmp_path, "a.json", json.dumps({"train_batch_size": 8, **inner}))
    assert lost(found) == [f"config.{key}" for key in keys]


@pytest.mark.parametrize(
    ("config", "keys", "expected"),
    [
        ("FSDP, fsdp_config: {fsdp_auto_wrap_policy: FOO}", ["fsdp_auto_wrap_policy"], {}),
        ("FSDP, fsdp_config: foo", ["fsdp_config"], {}),
        ("FSDP, fsdp_config: {1: 2}", ["1"], {}),
        (
            "FSDP, fsdp_config: {fsdp_transformer_layer_cls_to_wrap: 5}",
            ["ShardedDP"],
            None,
        ),
        (
            "FSDP, fsdp_config: {fsdp_reshard_after_forward: 'false', fsdp_version: 2}",
            [],
            {"sharding_strategy": "shard_grad_op"},
        ),
        ("FSDP, parallelism_config: {parallelism_config_foo: 2}", ["parallelism_config_foo"], {}),
        ("FSDP, parallelism_config: [1]", ["parallelism_config"], {}),
        (
            "FSDP, fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}, "
            "parallelism_config: {parallelism_config_dp_replicate_size: 2}",
            ["parallelism_config_dp_replicate_size"],
            {},
        ),
        (
            "FSDP, fsdp_config: {fsdp_offload_params: true}, "
            "parallelism_config: {parallelism_config_tp_size: 2}",
            ["ShardedDP"],
            None,
        ),
        ("NO, num_processes: null", ["num_processes"], {"sharding_strategy": "no_shard"}),
        ("NO, num_processes: auto, gpu_ids: [a]", ["num_processes", "gpu_ids"], {}),
        ("MULTI_GPU, use_cpu: 'false', machine_rank: 1, downcast_bf16: 'no'", [], {}),
        ("TPU", ["distributed_type"], {}),
        ("DEEPSPEED, deepspeed_config: [1]", ["deepspeed_config"], {}),
        ("DEEPSPEED, deepspeed_config: {zero_stage: 2, typo: 1}", ["typo"], {}),
        (
            "DEEPSPEED, deepspeed_config: {gradient_accumulation_steps: null}",
            [],
            {},
        ),
        ("DEEPSPEED, deepspeed_config: {gradient_clipping: auto}", [], {}),
        (
            "DEEPSPEED, deepspeed_config: {deepspeed_config_file: none.json, typo: 1}",
            ["typo", "config"],
            {},
        ),
    ],
)
def test_no_key_of_accelerate_vanishes(
    tmp_path: Path, config: str, keys: list[str], expected: dict[str, Any] | None
) -> None:
    found = migrated(tmp_path, "a.yaml", f"{{distributed_type: {config}}}")
    assert lost(found) == keys
    assert "accelerator: cpu" not in found.text
    if expected is not None:
        assert options(found).items() >= expected.items()


def test_keys_that_accelerate_does_not_look_at_have_a_line(tmp_path: Path) -> None:
    for text, key in (
        ("MULTI_GPU, fsdp_config: {fsdp_offload_params: true}", "fsdp_config"),
        (
            "FSDP, fsdp_config: {fsdp_auto_wrap_policy: NO_WRAP, fsdp_min_num_params: 5}",
            "fsdp_min_num_params",
        ),
    ):
        found = migrated(tmp_path, "a.yaml", f"{{distributed_type: {text}}}")
        assert key in [note.key for note in found.translation.notes]


@pytest.mark.parametrize(
    ("inner", "keys"),
    [
        ("foo", ["init_args: 'foo'"]),
        ("{1: 2}", ["1"]),
        ("{device_mesh: {a: 1}}", ["device_mesh"]),
        ("{timeout: '0:30:00'}", []),
        ("{timeout: {class_path: datetime.timedelta, init_args: {seconds: 5}}}", []),
        ("{timeout: soon}", ["timeout"]),
        ("{reshard_after_forward: x}", ["reshard_after_forward"]),
        ("{cpu_offload: {class_path: my.Offload}}", ["cpu_offload"]),
    ],
)
def test_values_in_yaml_of_lightning(tmp_path: Path, inner: str, keys: list[str]) -> None:
    text = f"runs: [{{strategy: {{class_path: FSDPStrategy, init_args: {inner}}}}}]"
    found = migrated(tmp_path, "a.yaml", text)
    assert found.location.endswith(": runs[0].strategy")
    assert lost(found) == keys


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.py", b"\xef\xbb\xbfTrainer(strategy='ddp')"),
        ("a.py", b"# coding: latin-1\n# \xe9\nTrainer(strategy='ddp')"),
        ("a.json", b'\xef\xbb\xbf{"zero_optimization": {}}'),
    ],
)
def test_marks_of_encodings_are_read(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert "no_shard" in migrate(tmp_path / name)[0].text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "trainer: {devices: 2}", "chooses no strategy"),
        ("a.yaml", "[1, 2]", "expected a mapping"),
        ("a.yaml", "a: [1", "cannot be parsed"),
        ("a.json", "{", "cannot be parsed"),
        ("a.json", '{"a":' * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ("a.yaml", "a: &x {strategy: ddp, again: *x}", "holds itself"),
        ("a.py", "def", "cannot be parsed"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        migrated(tmp_path, name, text)
