"""GPUs by the names that people and drivers give them."""

import pytest

from shardeddp.errors import ConfigurationError
from shardeddp.plan.hardware import GPUS, Cluster, find_gpu, gpu_of_device
from shardeddp.planner.collectives import Collective
from shardeddp.planner.cost import Constants, time_collective


@pytest.mark.parametrize(
    ("device", "gigabytes", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, "A100-80"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40"),
        ("NVIDIA A100-PCIE-40GB", 40, "A100-PCIE"),
        ("NVIDIA A100 80GB PCIe", 80, "A100-PCIE"),
        ("NVIDIA H100 80GB HBM3", 80, "H100-80"),
        ("NVIDIA H100 NVL", 94, "H100-NVL"),
        ("NVIDIA H100 PCIe", 80, "H100-PCIE"),
        ("NVIDIA H200", 141, "H200"),
        ("NVIDIA GH200 480GB", 96, "GH200"),
        ("NVIDIA B200", 180, "B200"),
        ("Tesla V100-SXM2-32GB", 32, "V100"),
        ("AMD Instinct MI300X", 192, "MI300X"),
        ("NVIDIA L40S", 48, "L40S"),
        ("Tesla V100-SXM2-16GB", 16, "V100"),
        ("NVIDIA GeForce RTX 4090", 24, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5, None),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 80, None),
        ("GRID A100-10C", 10, None),
        ("NVIDIA L40S-48Q", 48, None),
        ("NVIDIA H200", 18, None),
        ("NVIDIA A100-PCIE-40GB", 5, None),
        ("", 24, None),
    ],
)
def test_a_driver_s_name_finds_the_gpu(device: str, gigabytes: int, name: str | None) -> None:
    assert gpu_of_device(device, gigabytes * 10**9) == name


def test_an_unknown_gpu_is_an_error_that_says_what_describes_it() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean H100.*gpu_figures"):
        find_gpu("H1000")
    with pytest.raises(ConfigurationError, match="--memory-gb"):
        find_gpu("abacus", bf16_tflops=1.0)


def gather(ranks: int) -> Collective:
    return Collective(kind="all_gather", phase="forward", unit=0, nbytes=1 << 20, ranks=ranks)


def test_a_ring_pays_for_every_hop_and_an_unstated_network_is_the_reference_s() -> None:
    free = Constants(hop_us=0.0)
    for gpus in (8, 512):
        cluster = Cluster(gpu=GPUS["H100-80"], count=gpus)
        hops = time_collective(gather(gpus), cluster, Constants(hop_us=7.0))
        assert hops - time_collective(gather(gpus), cluster, free) == pytest.approx(
            7e-6 * (gpus - 1)
        )
    stated, unstated = (
        time_collective(
            gather(64),
            Cluster(gpu=GPUS["H100-80"], count=64, network_gbits=network),
            Constants(network_unstated=0.5),
        )
        for network in (200, None)
    )
    assert stated == pytest.approx(unstated)
