"""A probe measures the ranks at hand, and what it writes is what plans are calibrated with."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from shardeddp.lightning import probe as module
from shardeddp.planner.calibration import Probe, calibrate, read, write
from support.trainers import EXPECTED_WARNINGS
from world import Worlds

pytestmark = pytest.mark.timeout(90)


def measured(path: str) -> Probe | None:
    """A probe of the pool's ranks as torchrun starts them, with sizes that take no time."""
    for message, category in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "probe"}
    sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "here", "MASTER_PORT": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ranks, **sizes}.items():
            patch.setenv(name, str(value))
        patch.setattr(module, "REPEATS", 3)
        patch.setattr(module, "WINDOW_S", 0.01)
        patch.setitem(module.MATMULS, "cpu", (32, 64))
        patch.setitem(module.DECODERS, "cpu", ((2, 32, 4, 2, 16), (1, 64, 4, 2, 16)))
        patch.setitem(module.COPIED, "cpu", 1 << 20)
        patch.setitem(module.GATHERED, "cpu", (1 << 12, 1 << 16))
        found = module.probe()
    if found is not None:
        write(Path(path), found)
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_rank_0_has_what_all_ranks_have_measured(world: Worlds, tmp_path: Path, size: int) -> None:
    path = tmp_path / "probe.json"
    found, *others = world(size).run(measured, str(path))
    assert others == [None] * (size - 1)
    assert read(path) == found
    assert (found.device.name, found.device.ranks, found.device.per_node) == ("CPU", size, size)
    labels = [(it.label, it.dtype) for it in found.compute]
    assert labels.count(("matmul", "fp32")) == labels.count(("matmul", "bf16")) == 2
    assert labels.count(("decoder", "fp32")) == labels.count(("attention", "fp32")) == 2
    overlapped = {"all_gather", "reduce_scatter", "all_reduce"} if size > 1 else set()
    exchanged = {"all_to_all"} if size > 1 else set()
    assert {it.kind for it in found.collectives} == overlapped | exchanged
    assert {it.ranks for it in found.collectives} <= {size}
    assert set(found.interference) == overlapped
    assert size > 1 or found.collective_s == 0
    assert exchanged <= calibrate([path]).constants.rates.keys()


@pytest.mark.torture
@pytest.mark.timeout(500)
def test_the_command_probes_ranks_of_torchrun_and_plans_take_its_file(tmp_path: Path) -> None:
    python = [sys.executable, "-W", "ignore", "-m"]
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "-m"]
    path = str(tmp_path / "probe.json")
    dims = "layers=2,width=64,heads=4,vocabulary=64"
    options = ["--dims", dims, "--gpus", "2", "--precision", "32-true", "--calibrate", path]
    for command in ([*torchrun, "shardeddp", "probe", "-o", path], ["shardeddp", "plan", *options]):
        done = subprocess.run(
            [*python, *command], check=False, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stdout.split())
        assert f"Calibrated with {path} (2 x CPU): matmul " in said
