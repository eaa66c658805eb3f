"""Tables of docs/configuration.md: `python docs/options.py` writes them anew from the descriptions in the code.

A row has the name of an argument of `ShardedDP`, or of a field of a group of options, its default as in YAML, and its
description.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import yaml

from shardeddp import (
    ActivationCheckpointing,
    CheckpointOptions,
    CPUOffload,
    MixedPrecision,
    ShardedDP,
)

PAGE = Path(__file__).resolve().parent / "configuration.md"
GROUPS: dict[str, type] = {
    "mixed_precision": MixedPrecision,
    "activation_checkpointing": ActivationCheckpointing,
    "cpu_offload": CPUOffload,
    "checkpoint_options": CheckpointOptions,
}
SET_BY_THE_TRAINER = {"accelerator", "parallel_devices", "precision_plugin"}
MORE = {
    "sharding_strategy": "sharding-strategies.md",
    "shard_size": "topology.md#nodes-that-are-near-each-other",
    "auto_wrap_policy": "#auto_wrap_policy",
    "activation_checkpointing": "activation-checkpointing.md",
    "optimizer_scope": "optimizers.md",
    "tensor_parallel_plan": "tensor-parallel.md",
    "expert_parallel_size": "expert-parallel.md",
    "uneven_batches": "faults.md",
    "uneven_units": "faults.md",
    "state_dict_type": "checkpoints.md",
    "debug": "faults.md",
    "plan_only": "planning.md#a-dry-run-of-a-trainer",
}
"""Pages that say more about an option."""


def descriptions(documented: type) -> dict[str, str]:
    """The description of each argument in a docstring, as Markdown in one line."""
    arguments = (inspect.getdoc(documented) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (\w+): ", arguments, flags=re.MULTILINE)[1:]
    texts = [re.sub(r"\s+", " ", text).strip().replace("``", "`") for text in entries[1::2]]
    return dict(zip(entries[::2], texts, strict=True))


def as_yaml(value: Any) -> str:
    """A default as YAML has it."""
    text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value)
    return text.replace("...", "").strip()


def table(documented: type) -> str:
    """The table of the arguments of a class."""
    signature, rows = inspect.signature(documented).parameters, list[str]()
    for name, text in descriptions(documented).items():
        if documented is ShardedDP and name in SET_BY_THE_TRAINER:
            continue
        default = signature[name].default
        shown = "see below" if default == CheckpointOptions() else f"`{as_yaml(default)}`"
        if documented is ShardedDP and name in GROUPS:
            text += f" [Fields](#{name})."
        if documented is ShardedDP and name in MORE:
            text += f" [More]({MORE[name]})."
        rows.append(f"| `{name}` | {shown} | {text} |\n")
    head = "option" if documented is ShardedDP else "field"
    return f"| {head} | default | meaning |\n|---|---|---|\n{''.join(rows)}"


def written(page: str) -> str:
    """The page with each table as the code has it."""
    for title, documented in {"All options": ShardedDP, **GROUPS}.items():
        before, heading, after = page.partition(f"\n## {title}\n\n")
        rest = re.sub(r"\A(\|.*\n)*", "", after)
        page = before + heading + table(documented) + rest
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
