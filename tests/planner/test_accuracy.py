"""The benchmark of the planner's accuracy reads published runs and ends with its three figures."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# MPT-13B on 8 H100: mosaicml/llm-foundry, scripts/train/benchmarking/README.md at 8c8dd48f7216.
RUN: dict[str, Any] = {
    "id": "foundry-0026",
    "source": {"key": "foundry"},
    "system": "Composer/FSDP1",
    "model": {
        "name": "mpt-13b",
        "family": "mpt",
        "n_layers": 40,
        "d_model": 5120,
        "n_heads": 40,
        "n_kv_heads": 40,
        "d_ff": 20480,
        "mlp": "gelu",
        "vocab": 50368,
        "tied": True,
        "bias": False,
        "pos": "learned",
        "seq": 32768,
        "params": 13011240960,
    },
    "hardware": {
        "gpu": "H100-80",
        "gpus": 8,
        "gpus_per_node": 8,
        "inter_node_gbps_per_gpu": None,
        "bf16": 989,
        "fp8": 1979,
        "hbm_gb": 80,
        "hbm_tbs": 3.35,
        "nvlink": 450,
    },
    "parallel": {
        "strategy": "full_shard",
        "shard_size": 8,
        "dp": 8,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
    },
    "run": {
        "seq_len": 32768,
        "micro_batch": 1,
        "grad_accum": 3,
        "global_batch": 24,
        "precision": "bf16",
        "activation_checkpointing": "full",
        "compile": False,
        "reduce_dtype": "fp32",
    },
    "measured": {"tokens_per_s_per_gpu": 1976.0, "step_s": 49.7364},
    "trust": "A",
    "notes": "",
}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_published_run_is_judged(tmp_path: Path) -> None:
    others = {**RUN, "id": "fp8", "run": {**RUN["run"], "precision": "fp8"}}
    (tmp_path / "runs.json").write_text(json.dumps({"rows": [RUN, others]}))
    script = str(ROOT / "benchmarks/plan_accuracy.py")
    command = [sys.executable, script, "--judge", str(tmp_path / "runs.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "left out: fp8: ValueError: precision fp8" in done.stdout
    figures = re.fullmatch(r"mean ([\d.]+) median ([\d.]+) p90 ([\d.]+)", last)
    assert figures is not None, last
    assert 0 < float(figures[1]) < 10
    assert "runs that ran: 1 of 1 are said to fit" in done.stdout
