"""Streams of a device are in order, in every combination of options; found without a device.

``support/stream_races.py`` explains how. The checker itself is tested by mutants: a line of the package that orders
streams is taken away, and what is found has to name the lines that then meet.
"""

import ast
import importlib
import inspect
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist

from shardeddp import CPUOffload
from support.race_scenarios import ON_HOST, STRATEGIES, Outcome, Scenario, check, covering
from world import Worlds

pytestmark = pytest.mark.timeout(120)


def found_in(strength: int) -> dict[str, list[str]]:
    """Violations of a grid, by run."""
    with quiet():
        outcomes = {str(scenario): check(scenario) for scenario in covering(strength)}
    return {name: outcome.violations for name, outcome in outcomes.items() if outcome.violations}


@contextmanager
def quiet() -> Iterator[None]:
    """A rank of a world that is not there, which warns of much."""
    dist.destroy_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcomes_of(scenarios: Sequence[Scenario]) -> list[Outcome]:
    """What runs show."""
    with quiet():
        return [check(scenario) for scenario in scenarios]


@pytest.mark.slow
@pytest.mark.long
def test_everything_is_ordered_where_two_options_meet(world: Worlds) -> None:
    assert world(1).run(found_in, 2, timeout_s=110) == [{}]


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_everything_is_ordered_where_three_options_meet(world: Worlds) -> None:
    assert world(1).run(found_in, 3, timeout_s=1100) == [{}]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_state_on_the_host_trains_as_state_on_the_device(world: Worlds, strategy: str) -> None:
    usual = Scenario(strategy=strategy, accumulate=2, outside=True)
    offloads = [CPUOffload(params=True), CPUOffload(optimizer=True)]
    scenarios = [usual, *(replace(usual, options={"cpu_offload": each}) for each in offloads)]
    [(usually, *others)] = world(1).run(outcomes_of, scenarios)
    assert len(set(usually.losses)) == len(usually.losses)
    for other in others:
        assert other.losses == pytest.approx(usually.losses, rel=1e-5)


@pytest.mark.slow
def test_a_steady_step_does_not_hold_the_host_up(world: Worlds) -> None:
    on_device = Scenario(strategy="hybrid_shard", accumulate=2, precision="bf16-mixed", clip=0.1)
    from_host = Scenario(options={"cpu_offload": CPUOffload(params=True)})
    recomputed = Scenario(options={"activation_checkpointing": ON_HOST})
    [found] = world(1).run(outcomes_of, [on_device, from_host, recomputed])
    holds = [outcome.holds for outcome in found]
    # For copies of each of four units, in forward and in backward but for the root and for the last
    # block, and for the gradients.
    assert holds == [{}, {"event": 6, "synchronize": 1}, {}]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_users_assign_are_ordered(
    world: Worlds, strategy: str, accumulate: int
) -> None:
    scenario = Scenario(strategy=strategy, accumulate=accumulate, assigns=True)
    [[outcome]] = world(1).run(outcomes_of, [scenario])
    assert outcome.violations == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_views_that_leave_their_unit_is_unmapped_in_order(
    world: Worlds, strategy: str
) -> None:
    [[outcome]] = world(1).run(outcomes_of, [Scenario(strategy=strategy, keeps=True)])
    assert outcome.violations == []


# -- Mutants

FULL = Scenario()


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A line of the package without which something is not in order."""

    place: str
    """Module and function."""

    line: str
    becomes: str = "pass"
    scenario: Scenario = FULL
    kind: str = "race"
    told: Sequence[str]
    """Parts of one violation."""


HYBRID = Scenario(strategy="hybrid_shard")
WIDER = replace(HYBRID, precision="bf16-true")
FROM_HOST = Scenario(options={"cpu_offload": CPUOffload(params=True)})
STREAMS = "shardeddp.comm.streams:"
GROUP = "shardeddp.engine.flat_group:FlatGroup."
REDUCTION = "shardeddp.engine.reduction:Reduction."

MUTANTS = {
    "streams do not follow compute": Mutant(
        place=STREAMS + "CudaStream.issue",
        line="self.follow_compute()",
        told=["reduce_scatter_single(output, buffer", "foreach_copy_(targets, sources)"],
    ),
    "compute does not wait for streams": Mutant(
        place=STREAMS + "StreamHandle.wait",
        line="torch.cuda.current_stream(self._device).wait_event(self._done)",
        told=["all_gather_single(buffer, own", "on compute"],
    ),
    "the event is recorded on another stream": Mutant(
        place=STREAMS + "CudaStream.issue",
        line="done.record(self._stream)",
        becomes="done.record(torch.cuda.current_stream(self._device))",
        told=["all_gather_single(buffer, own", "on compute"],
    ),
    "gathered memory is released before compute is done": Mutant(
        place=GROUP + "release",
        line="self._mesh.gather_stream.follow_compute()",
        kind="use after unmap",
        told=["on compute", "GatheredBuffer.release", "of gather_stream"],
    ),
    "gathered memory that a view keeps is unmapped before compute is done": Mutant(
        place="shardeddp.engine.storage:GatheredBuffer.release",
        line="self.flat.record_stream(torch.cuda.current_stream(self._device))",
        scenario=replace(FULL, keeps=True),
        kind="use after unmap",
        told=["on compute", "of gather_stream"],
    ),
    "a main shard on the host is gathered before it has arrived": Mutant(
        place=GROUP + "_copy_main_shard",
        line="self._copying.wait()",
        scenario=FROM_HOST,
        told=["(FlatGroup._copy_in", "target.copy_(self._arriving)"],
    ),
    "its copy's memory is used again while it is gathered": Mutant(
        place=GROUP + "_copy_main_shard",
        line="self._mesh.copy_in_stream.follow_compute()",
        scenario=FROM_HOST,
        kind="use after unmap",
        told=["target.copy_(self._arriving)", "of copy_in_stream"],
    ),
    "the host writes to a main shard that is being copied": Mutant(
        place=GROUP + "finish_copies",
        line="self._copying.synchronize()",
        scenario=replace(FROM_HOST, between=True),
        told=["(FlatGroup._copy_in", "on host"],
    ),
    "the optimizer reads gradients before they are on the host": Mutant(
        place="shardeddp.comm.mesh:Mesh.drain",
        line="self.copy_out_stream.drain()",
        scenario=FROM_HOST,
        told=["shard.copy_(output, non_blocking=True)", "on host"],
    ),
    "the gradient buffer is given back while it is copied to the host": Mutant(
        place=REDUCTION + "_after",
        line="if index == 0 and plan.output_in_buffer:",
        becomes="if False:",
        scenario=FROM_HOST,
        kind="use after unmap",
        told=["shard.copy_(output, non_blocking=True)"],
    ),
    "gradients are read before replicas have shared them": Mutant(
        place=REDUCTION + "_finish_later_stages",
        line="self._issued[stage].wait()",
        scenario=HYBRID,
        told=["dist.all_reduce(tensor", "on compute"],
    ),
    "memory of a reduction is released while replicas share it": Mutant(
        place=REDUCTION + "_finish_later_stages",
        line="self._memory.mesh.reduce_stream.follow_compute()",
        scenario=WIDER,
        kind="use after unmap",
        told=["dist.all_reduce(tensor", "of reduce_stream"],
    ),
    "replicas share the gradient buffer itself": Mutant(
        place=REDUCTION + "_after",
        line="if index == 0 and plan.output_in_buffer:",
        becomes="if False:",
        scenario=WIDER,
        kind="use after unmap",
        told=["dist.all_reduce(tensor"],
    ),
    "assigned gradients are given back before they are added": Mutant(
        place=REDUCTION + "_after",
        line="self._output.add_(self._partial)",
        becomes="self._output.add_(self._partial); self._partial = None",
        scenario=replace(HYBRID, assigns=True),
        kind="use after unmap",
        told=["self._output.add_(self._partial)", "of compute"],
    ),
    "the gradient buffer is given back before it is reduced": Mutant(
        place=REDUCTION + "_finish_shard_group",
        line="self._issued[ReductionStage.IN_SHARD_GROUP].wait()",
        kind="use after unmap",
        told=["reduce_scatter_single(output, buffer", "of compute"],
    ),
    "a parameter is used outside of its unit before it has arrived": Mutant(
        place="shardeddp.tensor.shard_tensor:gather",
        line="spec.mesh.gather_stream.issue(lambda: spec.mesh.slices.all_gather_uneven_(pieces)).wait()",
        becomes="spec.mesh.gather_stream.issue(lambda: spec.mesh.slices.all_gather_uneven_(pieces))",
        scenario=Scenario(outside=True),
        told=["dist.all_gather([*pieces]", "on compute"],
    ),
    "a norm is read before ranks have added it up": Mutant(
        place="shardeddp.tensor.dispatch:reduce_partials",
        line='stream.issue(lambda: group.all_reduce_(partial, "sum")).wait()',
        becomes='stream.issue(lambda: group.all_reduce_(partial, "sum"))',
        scenario=Scenario(clip=0.1),
        told=["dist.all_reduce(tensor", "on compute"],
    ),
    "owners step before parameters have arrived": Mutant(
        place="shardeddp.optim.whole_parameter:OwnerTransfers._run",
        line="self._stream.issue(lambda: self._group.all_to_all(arriving, leaving)).wait()",
        becomes="self._stream.issue(lambda: self._group.all_to_all(arriving, leaving))",
        scenario=Scenario(muon=True),
        told=["recv on transfers", "_bytes_of(piece).copy_(arrived)"],
    ),
    "transfers are not waited for": Mutant(
        place="shardeddp.comm.backends:NativeCollectives.all_to_all",
        line="work.wait()  # on the stream, not on the host",
        scenario=Scenario(muon=True),
        told=["recv on transfers", "_bytes_of(piece).copy_(arrived)"],
    ),
    "the optimizer steps before its copies are on the host": Mutant(
        place="shardeddp.optim.elementwise:HostCopies.begin_step",
        line="torch.cuda.current_stream(device).synchronize()",
        scenario=Scenario(options={"cpu_offload": CPUOffload(optimizer=True)}),
        told=["copy.grad.copy_(gradient, non_blocking=True)", "on host"],
    ),
    "a checkpoint is written before its copies are on the host": Mutant(
        place="shardeddp.checkpoint.snapshot:HostMemory.copies",
        line="torch.accelerator.synchronize(device)",
        scenario=Scenario(snapshots=True),
        told=["copy_(tensor, non_blocking=True)", "copies that a thread will write"],
    ),
}


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """The package with a mutant in it."""
    module, _, path = mutant.place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    line = mutant.line
    if source.count(line) != 1:
        raise ValueError(f"{mutant.place} has {source.count(line)} times {line!r}")
    tree = ast.increment_lineno(
        ast.parse(source.replace(line, mutant.becomes)), function.__code__.co_firstlineno - 1
    )
    flags = (
        function.__code__.co_flags & importlib.import_module("__future__").annotations.compiler_flag
    )
    names: dict[str, Any] = {}
    exec(
        compile(tree, inspect.getfile(function), "exec", flags=flags),
        vars(importlib.import_module(module)),
        names,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, names[name])
        yield


def found_with(name: str) -> list[str]:
    """What is found in the run of a mutant."""
    mutant = MUTANTS[name]
    with quiet(), mutated(mutant):
        return check(mutant.scenario).violations


@pytest.mark.loop(1)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_order_is_found_and_its_lines_are_named(world: Worlds, name: str) -> None:
    mutant = MUTANTS[name]
    [found] = world(1).run(found_with, name)
    assert any(
        each.startswith(mutant.kind) and all(part in each for part in mutant.told) for each in found
    ), "\n".join(found)
