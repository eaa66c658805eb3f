"""BatchNorm over the batches of all ranks on the host, where torch's ``SyncBatchNorm`` knows devices only."""

import torch
import torch.distributed as dist
from torch import nn

from shardeddp.comm import sum_over_ranks


class HostSyncBatchNorm(nn.SyncBatchNorm):
    """A ``SyncBatchNorm`` that computes on the host as well; on a device it is torch's own.

    Mean and variance are those of one process on the whole batch, also where ranks have batches of different sizes.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shape (batch, channels, ...) to the same; a collective of the layer's process group while training."""
        if input.device.type != "cpu" or not self.training or not dist.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        wide = input if input.dtype is torch.float64 else input.float()
        mean, variance, count = self._statistics(wide)
        if self.track_running_stats:
            self._follow(mean.detach(), variance.detach() * count / (count - 1))
        shape = (1, -1, *(1 for _ in input.shape[2:]))
        scale = (variance + self.eps).rsqrt()
        normal = (wide - mean.to(wide.dtype).view(shape)) * scale.to(wide.dtype).view(shape)
        weight, bias = self._parameters["weight"], self._parameters["bias"]  # None without affine=True or bias=True
        if weight is not None:
            normal = normal * weight.view(shape)
        if bias is not None:
            normal = normal + bias.view(shape)
        return normal.to(input.dtype)

    def _statistics(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and variance of every channel, and the number of elements, over all ranks; in float64."""
        by_channel = values.transpose(0, 1).flatten(1)  # (channels, this rank's elements)
        count = by_channel.shape[1]
        mean = by_channel.sum(1) / max(count, 1)
        squares = (by_channel - mean.unsqueeze(1)).square().sum(1).double()
        mean = mean.double()
        # In float64, so that nothing is lost where the mean is large against the deviation from it.
        total = sum_over_ranks(
            torch.cat([count * mean, squares + count * mean.square(), mean.new_tensor([count])]), self.process_group
        )
        count_of_all = total[-1].detach()
        if count_of_all < 2:
            raise ValueError(
                f"BatchNorm over all ranks: expected more than one value per channel when training, found "
                f"{int(count_of_all)}, with an input of {tuple(values.shape)} on this rank. Use a larger batch"
            )
        mean_of_all, mean_square = (total[:-1] / count_of_all).chunk(2)
        return mean_of_all, (mean_square - mean_of_all.square()).clamp_min(0), count_of_all

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Let the running statistics take part of the batch's."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def synchronize_on_host(module: nn.Module) -> None:
    """Let every ``SyncBatchNorm`` in a module compute on the host as well, in place; names and states stay."""
    for child in module.modules():
        if type(child) is nn.SyncBatchNorm:
            child.__class__ = HostSyncBatchNorm
