"""What a later setup of a sharded module keeps, refuses and leaves of earlier ones; numbers: in ``tests/fidelity``."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp import ShardedDP, ShardTensor
from shardeddp.errors import ConfigurationError, LayoutMismatchError
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(90)

STRATEGIES = ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"]


class Gpt(TinyGpt):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(model: TinyGpt, name: str = "full_shard", **arguments: Any) -> Any:
    trainer = make_trainer(
        ShardedDP(name, **{"auto_wrap_policy": {Block}, **arguments}), max_steps=2, max_epochs=-1
    )
    trainer.fit(model, token_loader(8 * dist.get_world_size()))
    return trainer


def only_sharded(model: nn.Module) -> bool:
    return all(isinstance(parameter, ShardTensor) for parameter in model.parameters())


@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_a_module_that_has_not_changed_keeps_its_units(name: str) -> None:
    model = Gpt()
    first = fit(model, name)
    sent = first.strategy.mesh.traffic.calls["broadcast"]
    again = fit(model, name)
    assert again.strategy.runtime is first.strategy.runtime
    assert again.strategy.mesh is first.strategy.mesh
    assert first.strategy.mesh.traffic.calls["broadcast"] == sent  # no values from rank 0
    model.blocks.append(Block(8))
    changed = fit(model, name)
    assert changed.strategy.runtime is not first.strategy.runtime
    assert [progress.unit.label for progress in changed.strategy.runtime.progresses] == [
        "(root)",
        *(f"blocks.{number}" for number in range(4)),
    ]
    assert only_sharded(model)


@pytest.mark.slow
@on_ranks(2)
def test_a_layer_of_one_rank_alone_is_an_error_of_all_that_loses_nothing() -> None:
    model = Gpt()
    fit(model)
    before = full_weights(model)
    if dist.get_rank() == 1:
        model.blocks.append(Block(8))
    with pytest.raises(LayoutMismatchError, match=r"blocks\.3"):
        fit(model)
    if dist.get_rank() == 1:
        del model.blocks[3]
    assert_same_weights(full_weights(model), before, 0)
    fit(model)
    assert any(not torch.equal(found, before[name]) for name, found in full_weights(model).items())


@on_ranks(2)
def test_a_setup_that_fails_leaves_values_hooks_and_gradients() -> None:
    model = Gpt()
    fit(model)
    model.blocks.append(Block(8))
    before, gradients = full_weights(model), list[torch.Tensor]()
    with pytest.raises(ConfigurationError, match="expected at least one module of class"):
        fit(model, auto_wrap_policy={nn.Conv2d})
    assert_same_weights(full_weights(model), before, 0)
    warnings.filterwarnings("ignore", "parameter embed.weight is used outside")
    weight = model.embed.weight
    assert isinstance(weight, ShardTensor)
    handle = weight.register_hook(gradients.append)
    weight.square().sum().backward()  # of no unit now, and still differentiable
    assert torch.allclose(gradients[0], 2 * before["embed.weight"])
    handle.remove()
    fit(model)
    assert only_sharded(model)


def with_parts_of(other: Gpt) -> Gpt:
    """A model with the embedding and the blocks of another one."""
    model = Gpt()
    model.embed, model.blocks = other.embed, other.blocks
    model.head = nn.Linear(8, other.head.out_features, bias=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_the_module_that_parts_were_taken_from_shows_what_they_are_now(name: str) -> None:
    pretrained = Gpt()
    pretrained.extra = nn.Linear(2, 2)
    first = fit(pretrained, name)
    extra = full_weights(pretrained)["extra.weight"]
    tuned = with_parts_of(pretrained)
    fit(tuned, name)
    values = full_weights(tuned)
    found = full_weights(pretrained)
    for key in found:
        if not key.startswith("extra"):
            assert torch.equal(found[key], values[key.replace("head", "embed")]), key
    assert torch.equal(found["extra.weight"], extra)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        logits = pretrained(tokens)
    whole = TinyGpt()
    whole.load_state_dict({key: it for key, it in found.items() if "extra" not in key})
    torch.testing.assert_close(logits, whole(tokens).detach())
    with first.strategy.summon_full_params(pretrained):
        assert type(pretrained.extra.weight) is not ShardTensor
        assert torch.equal(pretrained.extra.weight.detach(), extra)
        if dist.get_rank() == 0:
            with torch.no_grad():
                pretrained.blocks[0].up.weight.zero_()
    assert not full_weights(tuned)["blocks.0.up.weight"].any()
    fit(pretrained, name)
    assert only_sharded(pretrained)
    assert only_sharded(tuned)


def save_both(folder: str) -> None:
    pretrained = Gpt()
    first = fit(pretrained)
    tuned = with_parts_of(pretrained)
    second = fit(tuned)
    for number, (trainer, module) in enumerate([(first, pretrained), (second, tuned)]):
        trainer.save_checkpoint(f"{folder}/{number}.ckpt")
        saved = torch.load(f"{folder}/{number}.ckpt", weights_only=False)["state_dict"]
        assert_same_weights(saved, full_weights(module), 0)


@pytest.mark.slow
def test_both_modules_can_be_saved(world: Worlds, tmp_path: Any) -> None:
    world(2).run(save_both, str(tmp_path))


@on_ranks(2)
def test_a_module_at_work_is_not_sharded_anew() -> None:
    model = Gpt()
    trainer = fit(model)
    with (
        pytest.raises(RuntimeError, match="inside of a step or of summon_full_params"),
        trainer.strategy.summon_full_params(),
    ):
        fit(model, "no_shard")
    before = full_weights(model)
    fit(model, "no_shard")
    assert any(not torch.equal(found, before[name]) for name, found in full_weights(model).items())


@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_a_graph_of_an_earlier_setup_is_refused(name: str) -> None:
    model = Gpt()
    fit(model, name)
    loss = model.loss(torch.zeros(2, 4, dtype=torch.int64))
    model.blocks.append(Block(8))
    fit(model, name)
    with pytest.raises(RuntimeError, match=r"sharded anew|before its model was sharded"):
        loss.backward()


@on_ranks(2)
def test_debug_can_be_switched_on_for_a_sharded_module() -> None:
    model = Gpt()
    fit(model)
    trainer = fit(model, debug=True)
    assert trainer.strategy.mesh.compares_user_calls
    assert not fit(model).strategy.mesh.compares_user_calls


@pytest.mark.slow
@on_ranks(2)
def test_another_timeout_for_a_sharded_module_is_not_ignored_without_a_word() -> None:
    model = Gpt()
    first = fit(model, timeout=60, checkpoint_options={"timeout": 90})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = fit(model, timeout=50)
        fit(model, timeout=60, checkpoint_options={"timeout": 90})
    assert again.strategy.mesh is first.strategy.mesh
    texts = [str(it.message) for it in caught if "timeout" in str(it.message)]
    assert [text.partition("is not applied")[0] for text in texts] == (
        ["the timeout of 50 s (50 s in saves) "] if dist.get_rank() == 0 else []
    )
    assert all("which have 60 s (90 s in saves)" in text for text in texts)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the timeout of")
        assert fit(Gpt(), timeout=50).strategy.mesh is not first.strategy.mesh


@pytest.mark.slow
@on_ranks(2)
def test_compiled_units_are_compiled_after_a_later_setup() -> None:
    # What torch's compiler does when it looks at the inputs of a graph.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    compiled, plain = Gpt(), Gpt()
    compiled.load_state_dict(plain.state_dict())
    calls = list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph

    compiled.blocks[0].compile(backend=backend)
    compiled.blocks[1] = torch.compile(compiled.blocks[1], backend=backend)  # type: ignore[assignment]
    for model in (compiled, plain):
        fit(model)
        state = torch.random.get_rng_state()
        torch.manual_seed(5)
        model.blocks.append(Block(8))
        torch.random.set_rng_state(state)
    calls.clear()
    torch._dynamo.reset()
    for model in (compiled, plain):
        fit(model)
    assert calls
    expected = full_weights(plain)
    for name, weight in full_weights(compiled).items():
        torch.testing.assert_close(weight, expected[name.replace("._orig_mod", "")])


@pytest.mark.loop(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@on_ranks(1)
def test_one_rank_takes_over_as_well(precision: Any) -> None:
    model = Gpt()
    for each in (precision, "32-true", precision):
        trainer = make_trainer(
            ShardedDP(auto_wrap_policy={Block}), max_steps=2, max_epochs=-1, precision=each
        )
        trainer.fit(model, token_loader(8))
        model.blocks.append(Block(8))
        assert len(model.losses) % 2 == 0
    tuned = with_parts_of(model)
    fit(tuned)
    assert not any(isinstance(parameter, ShardTensor) for parameter in tuned.parameters())
