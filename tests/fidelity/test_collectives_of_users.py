"""Collectives that users issue on parameters and gradients, in lists too: as under DDP, or refused by name."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from support.fidelity import EXPECTED, STRATEGIES, UNITS_TOO, BesideDdp, SmallGpt, case

pytestmark = pytest.mark.timeout(300)


def first() -> bool:
    return dist.get_rank() == 0


def empty(like: Tensor) -> list[Tensor]:
    """One tensor for each rank."""
    return [torch.zeros(like.shape) for _ in range(dist.get_world_size())]


def neighbours() -> tuple[int, int]:
    """The ranks before and behind this one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


class BeforeTheStep(SmallGpt):
    """Communicates gradients in a hook, and lets what arrives change them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        up, down = (self.blocks[0].up.weight, self.blocks[1].up.weight)
        found = self.exchange(up, down)
        total = torch.stack([each.double().tanh().mean() for each in found]).sum().float()
        dist.all_reduce(total)
        self.losses.append(total.item())
        up.grad.mul_(1 + 0.1 * total / dist.get_world_size())

    def exchange(self, one: Tensor, other: Tensor) -> list[Tensor]:
        raise NotImplementedError


class ReducesLists(BeforeTheStep):
    def exchange(self, one: Tensor, other: Tensor) -> list[Tensor]:
        own = torch.zeros(one.shape)
        size = dist.get_world_size()
        dist.reduce_scatter(own, [one.grad, other.grad, *empty(one)][:size])
        behind = torch.zeros(one.shape)
        dist.reduce_scatter(behind, [one.data] * size, op=dist.ReduceOp.MAX, async_op=True).wait()
        part = torch.zeros(2 * one.numel() // size)
        dist.reduce_scatter_tensor(part, torch.cat([one.grad.view(-1), other.grad.view(-1)]))
        rows = torch.zeros(one.shape[1])
        dist.reduce_scatter(rows, [*one.grad[:size]])
        return [own, behind, part, rows]


class GathersLists(BeforeTheStep):
    def exchange(self, one: Tensor, other: Tensor) -> list[Tensor]:
        gathered, of_first, whole = empty(one), empty(one), torch.zeros(0)
        dist.all_gather(gathered, one.grad.clone())
        dist.gather(other.grad, of_first if first() else None)
        flat = torch.zeros(dist.get_world_size() * one.numel())
        dist.all_gather_into_tensor(flat, one.data.view(-1))
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, {"grad": one.grad})
        dist.gather_object(other.data, [*objects] if first() else None)
        return [*gathered, *of_first, flat, whole.sum(), *(each["grad"] for each in objects)]


class GathersIntoGradients(BeforeTheStep):
    """What arrives is written to gradients and weights, the same on all ranks."""

    def exchange(self, one: Tensor, other: Tensor) -> list[Tensor]:
        size, mine = dist.get_world_size(), torch.full(one.shape, 0.01 * dist.get_rank())
        with torch.no_grad():
            dist.all_gather([one.grad, other.grad, *empty(one)][:size], mine)
            dist.all_gather([*one.data[:size]], mine[0])
            dist.reduce_scatter(other.grad, [mine] * size)
            same = [torch.full(one.shape, 0.5)] * size
            dist.scatter(one.grad, same if first() else None)
        return [one.grad.clone(), other.grad.clone(), one.detach().clone()]


class ExchangesAll(BeforeTheStep):
    def exchange(self, one: Tensor, other: Tensor) -> list[Tensor]:
        arrived, size = empty(one), dist.get_world_size()
        dist.all_to_all(arrived, [one.grad, other.grad, one.data, other.data][:size])
        flat = torch.zeros(one.numel())
        dist.all_to_all_single(flat, one.grad.view(-1))
        dist.all_reduce_coalesced([one.grad, other.grad])
        for each in (one, other):
            each.grad.div_(size)
        dist.broadcast(other.grad, 1)
        return [*arrived, flat]


class SendsInARing(BeforeTheStep):
    def exchange(self, one: Tensor, other: Tensor) -> list[Tensor]:
        before, behind = neighbours()
        arrived, later = torch.zeros(one.shape), torch.zeros(one.shape)
        sent = dist.isend(one.grad, behind)
        dist.recv(arrived, before)
        transfers = [
            dist.P2POp(dist.isend, other.data, behind),
            dist.P2POp(dist.irecv, later, before),
        ]
        for work in [sent, *dist.batch_isend_irecv(transfers)]:
            work.wait()
        return [arrived, later]


class Differentiates(BeforeTheStep):
    def exchange(self, one: Tensor, other: Tensor) -> list[Tensor]:
        size = dist.get_world_size()
        gathered = differentiable.all_gather(one.grad)
        own = differentiable.reduce_scatter(
            torch.zeros(one.shape), [one.grad, other.grad] * (size // 2)
        )
        return [*gathered, own, differentiable.all_reduce(other.grad.clone())]


class GathersWithGradients(SmallGpt):
    """Lightning's gather of weights of units and of the root, in the graph of the loss."""

    def loss(self, batch: Tensor) -> Tensor:
        given = {
            "up": self.blocks[0].up.weight,
            "rest": [self.blocks[1].norm.bias, self.head.weight],
        }
        found = self.all_gather(given, sync_grads=True)
        return super().loss(batch) + sum(
            each.mean(0).square().mean() for each in (found["up"], *found["rest"])
        )


class WritesInItsStep(SmallGpt):
    """Nothing but collectives writes to a codebook, a scale and a block, before their forwards."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        self.write(torch.full((1, 8), 0.1 * dist.get_rank() + 0.01 * batch_index))
        return super().training_step(batch, batch_index)

    def write(self, mine: Tensor) -> None:
        raise NotImplementedError


class GathersIntoRows(WritesInItsStep):
    def write(self, mine: Tensor) -> None:
        size, weight = dist.get_world_size(), self.embed.weight
        dist.all_gather_into_tensor(weight.data[:size], mine)
        dist.all_gather([*weight.detach()[size : 2 * size].split(1)], mine + 0.2)


class ReducesInPlace(WritesInItsStep):
    def write(self, mine: Tensor) -> None:
        norm, size = self.blocks[0].norm.bias, dist.get_world_size()
        dist.all_reduce(norm)
        dist.all_reduce(self.blocks[1].up.bias.data, async_op=True).wait()
        dist.all_reduce_coalesced([self.blocks[1].norm.bias.data])
        dist.reduce_scatter(self.blocks[0].up.bias.data[:8], [mine[0]] * size, op=dist.ReduceOp.MAX)


class ScattersTheSame(WritesInItsStep):
    def write(self, mine: Tensor) -> None:
        size = dist.get_world_size()
        dist.scatter(self.embed.weight.data[:1], [mine] * size if first() else None)


class WritesInAUnit(SmallGpt):
    """A block's forward hook, as codebooks that move with what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_pre_hook(self.follow)

    @staticmethod
    def follow(block: Any, inputs: tuple[Tensor]) -> None:
        with torch.no_grad():
            seen = inputs[0].mean((0, 1))[None]
            dist.all_gather_into_tensor(block.up.weight[: dist.get_world_size()], seen)


class KeepsItFromItsStep(SmallGpt):
    """References that were taken inside of a step, in a hook after it."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        self.kept = [self.blocks[0].up.weight, self.blocks[1].up.weight]
        return super().training_step(batch, batch_index)

    def on_train_batch_end(self, *_: Any) -> None:
        size = dist.get_world_size()
        with torch.no_grad():
            dist.all_gather(
                [*self.kept, *empty(self.kept[0])][:size],
                torch.full(self.kept[0].shape, 0.1 * dist.get_rank()),
            )
            total = torch.zeros(self.kept[0].shape)
            dist.reduce_scatter(total, [self.kept[1]] * size)
        self.losses.append(total.sum().item())


WARNS = f"{EXPECTED}|.* (is|will be) deprecated"  # torch 2.13 gives some collectives other names
CASES = [
    case(each, warns=WARNS)
    for each in (
        ReducesLists,
        GathersLists,
        GathersIntoGradients,
        ExchangesAll,
        SendsInARing,
        Differentiates,
        GathersWithGradients,
        GathersIntoRows,
        ReducesInPlace,
        ScattersTheSame,
        WritesInAUnit,
        KeepsItFromItsStep,
    )
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_collectives_on_lists_of_parameters_and_inside_of_steps_are_those_of_ddp(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)


# -- what one rank alone names


class OnOneRank(SmallGpt):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight, mine = self.blocks[0].up.weight, torch.zeros(self.blocks[0].up.weight.shape)
        self.exchange(weight, mine, mine if first() else None)

    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        raise NotImplementedError


class ScattersGradients(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        listed = None if on_first is None else [weight.grad] * dist.get_world_size()
        dist.scatter(mine, listed)


class ScattersWeightsDifferentiably(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        differentiable.scatter([weight.data if first() else mine] * dist.get_world_size())


class SendsToOne(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        if first():
            dist.send(weight.grad, 1)
        elif dist.get_rank() == 1:
            dist.recv(mine, 0)


class SendsARowToOne(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        if first():
            dist.send(weight.data[0], 1)
        elif dist.get_rank() == 1:
            dist.recv(mine[0], 0)


class SendsLaterToOne(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        works = []
        if first():
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, weight.data, 1)])
        elif dist.get_rank() == 1:
            works = [dist.irecv(mine, 0)]
        for work in works:
            work.wait()


class SendsObjects(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        if first():
            dist.send_object_list([weight.grad], 1)
        elif dist.get_rank() == 1:
            dist.recv_object_list([None], 0)


class BroadcastsObjects(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        dist.broadcast_object_list([{"weight": weight} if first() else None], 0)


class ScattersObjects(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        listed = [weight.data] * dist.get_world_size() if first() else None
        dist.scatter_object_list([None], listed)


NAMED = r"blocks\.0\.up\.weight"
ALONE = [
    case(each, refused=NAMED, steps=1)
    for each in (
        ScattersGradients,
        ScattersWeightsDifferentiably,
        SendsToOne,
        SendsARowToOne,
        SendsLaterToOne,
        SendsObjects,
        BroadcastsObjects,
        ScattersObjects,
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_one_rank_alone_reads_for_others_is_that_of_ddp_or_refused_by_name(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(ALONE, strategy)


class GathersIntoAParameter(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        listed = None if on_first is None else [weight.data, *empty(mine)[1:]]
        dist.gather(mine, listed)


class GathersIntoAGradient(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        listed = None if on_first is None else [*empty(mine)[1:], weight.grad]
        dist.gather(weight.data, listed)


class ReceivesIntoAGradient(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        if first():
            dist.send(mine, 1)
        elif dist.get_rank() == 1:
            dist.recv(weight.grad, 0)


class ScattersOthers(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        others = [mine + rank for rank in range(dist.get_world_size())]
        dist.scatter(weight.grad, others if first() else None)


class ReducesToOne(OnOneRank):
    def exchange(self, weight: Tensor, mine: Tensor, on_first: Tensor | None) -> None:
        dist.reduce(weight.grad, 0)


class ReceivesInAStep(SmallGpt):
    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        before, behind = neighbours()
        sent = dist.isend(torch.ones(self.embed.weight.shape), behind)
        dist.irecv(self.embed.weight.data, before).wait()
        sent.wait()
        return super().training_step(batch, batch_index)


REPLICAS_PART = [
    case(each, refused=NAMED, steps=1)
    for each in (
        GathersIntoAParameter,
        GathersIntoAGradient,
        ReceivesIntoAGradient,
        ScattersOthers,
        ReducesToOne,
    )
]
IN_A_STEP = [case(ReceivesInAStep, refused=r"embed\.weight|head\.weight", steps=1)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_would_leave_another_value_on_each_rank_is_refused_by_name(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp([*REPLICAS_PART, *IN_A_STEP], strategy)
