"""Functions of torch that read values: a step that prints or logs them is planned as one that does not."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.planner.plan import make_plan

pytestmark = pytest.mark.timeout(60)


class Reads(LightningModule):
    """A step that reads what it has computed."""

    def __init__(self, read: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.example_input_array = torch.zeros(4, 8)
        self.read = read

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss."""
        out = self.layer(batch)
        loss = out.pow(2).mean()
        match self.read:
            case "floats":
                value = loss.detach().cpu()
                assert (f"{loss:.3f}", f"{value}") == ("1.000", "1.0")
                assert f"{out:>9}"
                assert value.numpy() == np.asarray(value) == value.tolist() == 1
                assert out.detach().double().numpy().sum(dtype=np.float32) == out.numel()
                assert torch.ones(9000, 9000).numpy().strides == (0, 0), "takes no memory"
                assert [*torch.arange(3).numpy()] == [0, 1, 2]
                assert f"{torch.arange(3)[2]:>4}" == "   2"
            case "loop":
                while loss.detach().numpy() > 0:
                    pass
            case "numpy":
                (out > 0).sum().numpy()
            case "format":
                print(f"{(out > 0).sum()}")
            case "assertion":
                assert self.layer.bias is None
            case _:
                pass
        return loss


def plan(module: LightningModule) -> Any:
    return make_plan(module, micro_batches=(2,), strategies=("full_shard",))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_step_that_prints_and_logs_its_values_is_planned(precision: str) -> None:
    found = [
        make_plan(Reads(it), micro_batches=(2,), strategies=("full_shard",), precisions=[precision])
        for it in ("", "floats")
    ]
    assert found[0].best.task.work.matmul_flops == found[1].best.task.work.matmul_flops


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("numpy", r"DataDependentOutputException.*line \d+ of .*: \(out > 0\)\.sum\(\)\.numpy\(\)"),
        ("format", r"DataDependentOutputException.*line \d+ of .*test_device_functions\.py: print"),
        (
            "assertion",
            r"\(AssertionError: .*\), in line \d+ of .*: assert self\.layer\.bias is None",
        ),
        ("loop", r"line \d+ of .*test_device_functions\.py has read more"),
    ],
)
def test_a_refused_step_names_the_line_that_cannot_be_planned(read: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        plan(Reads(read))
