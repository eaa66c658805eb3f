"""States of whole parameters, which one rank keeps: what the others know of them, and what they ask for."""

from typing import Any
from unittest import mock

import pytest
import torch

from shardeddp.errors import RankError
from shardeddp.optim import whole_parameter
from support.optimizers import Closure, Lamb, Lion, owned_step_of
from training import Sharding, Trial, full, linears, square
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


def train_from(steps: range, state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Some steps with Lamb from a full state to a full state of model and optimizer."""
    torch.manual_seed(0)
    model = linears(2)
    if state is not None:
        model.load_state_dict(state[0])
    trial = Trial(model, Sharding(units=("1",)), Lamb, {"Lamb": "parameter"})
    if state is not None:
        trial.optimizer.load_state_dict(state[1])
    for step in steps:
        with trial.runtime.step("training_step") as outputs:
            outputs.append(square(trial.model, 0, step))  # the same data on all ranks
        outputs[0].backward()
        trial.step()
    whole = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda it: full(it).clone(), trial.optimizer.state_dict()
    )
    return {
        name: full(parameter).clone() for name, parameter in trial.model.named_parameters()
    }, whole


@pytest.mark.slow
def test_states_of_every_kind_move_to_another_number_of_ranks(world: Worlds) -> None:
    straight = world(1).run(train_from, range(6), None)[0]
    half = world(2).run(train_from, range(3), None)
    assert half[0][1]["state"][0].keys() == straight[1]["state"][0].keys()
    assert all(each[1]["state"][1]["count"] == 3 for each in half)  # numbers are known everywhere
    for weights, optimizer in world(3).run(train_from, range(3, 6), half[0]):
        for name, expected in straight[0].items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-6)
        expected, found = dict(straight[1]["state"][2]), optimizer["state"][2]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_numbers_among_states_travel_when_all_ranks_ask_and_are_never_shown_wrong() -> None:
    trial = Trial(linears(4), Sharding(), Lamb, {"Lamb": "parameter"})
    trial.train(square, steps=2)
    parameters = list(trial.model.parameters())
    whole_of = owned_step_of(trial.optimizer).wholes.of
    exchanges = [
        mock.patch.object(whole_parameter, name, wraps=vars(whole_parameter)[name])
        for name in TRAVELS
    ]
    with exchanges[0] as agree, exchanges[1] as gather, exchanges[2] as all_gather_bytes:
        trial.train(square, steps=2)
        assert [agree.call_args.args[0], agree.call_count] == [[False], 2]  # one byte a step
        assert not (gather.called or all_gather_bytes.called)
        shown = [trial.optimizer.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, shown, strict=True):
            if whole_of(parameter).tensor is None:
                for use in (
                    int,
                    bool,
                    lambda count: count + 1,
                    lambda count: count == 4,
                    "{:d}".format,
                ):
                    with pytest.raises(
                        RuntimeError, match=r"call optimizer.state_dict\(\) on all ranks"
                    ):
                        use(state["count"])
                assert state["moments"][0].shape == parameter.shape
            else:
                assert state["count"] == 4
        for _ in range(2):
            saved = trial.optimizer.state_dict()["state"]
            assert [saved[index]["count"] for index in range(len(parameters))] == [4] * len(
                parameters
            )
            assert [state["count"] for state in shown] == [4] * len(parameters)
        assert all_gather_bytes.call_count == 1  # the second finds them known
    for each in (trial.optimizer, trial.reference_optimizer):
        for state in each.state.values():
            state["count"] = 1
    trial.train(square, steps=1)
    assert {state["count"] for state in trial.optimizer.state_dict()["state"].values()} == {2}


TRAVELS = ("agree_on_any", "gather_results", "all_gather_bytes")


class KeepsObjects(Lion):
    """Has a state that no other rank could be told of."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        super().step()
        for state in self.state.values():
            state["object"] = object()


@on_ranks(2)
def test_a_state_that_cannot_be_told_to_others_is_an_error_on_all_ranks() -> None:
    trial = Trial(linears(2), Sharding(), KeepsObjects, {"KeepsObjects": "parameter"})
    trial.backward(square)
    with pytest.raises(RankError, match="KeepsObjects keeps a object as a state"):
        trial.step()
