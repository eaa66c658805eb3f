"""A module that recomputes: what it keeps, what it computes again, and that nothing else about it has changed."""

import copy
import inspect
import pickle
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from shardeddp.config import ActivationCheckpointing
from shardeddp.engine import activation_checkpointing
from shardeddp.engine.activation_checkpointing import checkpoint_activations

ROWS, WIDTH = 4, 16


class Block(nn.Module):
    """A residual block with arguments of the names that torch's ``checkpoint`` has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(
        self, x: torch.Tensor, *, debug: torch.Tensor | None = None, early_stop: float = 1.0
    ) -> torch.Tensor:
        """Return the sum of input and transformed input."""
        y = self.down(self.dropout(torch.tanh(self.up(x)))) * early_stop
        return x + (y if debug is None else y + debug)


class Net(nn.Module):
    """Three blocks behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, debug: torch.Tensor | None = None) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, debug=debug, early_stop=0.5)
        return x


def keep_addmm(context: object, operation: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"save_ops": "matmul"},
    "policy": {"save_ops": keep_addmm},
    "offload": {"cpu_offload": True},
}


def net(kind: str, **options: Any) -> Net:
    model = Net()
    checkpoint_activations(
        model, ActivationCheckpointing(**{"modules": [Block], **KINDS[kind], **options})
    )
    return model


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func.overloadpacket.__name__)] += 1
        return func(*args, **(kwargs or {}))


def loss(model: nn.Module, debug: torch.Tensor | None = None) -> torch.Tensor:
    torch.manual_seed(1)
    return model(torch.randn(ROWS, WIDTH), debug).pow(2).mean()


def gradients(model: nn.Module, debug: torch.Tensor | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    loss(model, debug).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def saved_numel(model: nn.Module) -> int:
    """Elements of the activations that the graph of a forward refers to."""
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        loss(model)
    return sum(tensor.numel() for tensor in saved if not isinstance(tensor, nn.Parameter))


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_model(kind: str) -> None:
    debug = torch.randn(ROWS, WIDTH, requires_grad=True)
    assert_same(gradients(net(kind)), gradients(Net()))
    assert_same(gradients(net(kind), debug), gradients(Net(), debug))


def test_of_a_module_only_its_input_is_saved() -> None:
    one = ROWS * WIDTH
    around = 2 * one  # the stem's input, the square's
    assert saved_numel(net("full")) == around + 3 * one
    assert saved_numel(net("full", every=2)) < saved_numel(Net())
    assert saved_numel(Net()) > around + 3 * 8 * one


@pytest.mark.parametrize(("kind", "again"), [("full", 3), ("selective", 0), ("policy", 0)])
def test_selective_recomputation_computes_no_product_again(kind: str, again: int) -> None:
    output = loss(net(kind))
    with Calls() as calls:
        output.backward()
    # The second layer's product is needed by nobody: the recomputation stops before it.
    assert calls.count["addmm"] == again
    assert calls.count["tanh"] == 3


@pytest.mark.parametrize("frozen", [False, True])
def test_without_gradients_the_forward_is_just_called(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_checkpointing, "checkpoint", None)
    model = net("full").requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        assert torch.equal(loss(model), loss(Net()))


def test_a_frozen_module_passes_gradients_on() -> None:
    recomputed, plain = net("full"), Net()
    for model in (recomputed, plain):
        model.blocks.requires_grad_(False)
    assert saved_numel(recomputed) < saved_numel(plain)
    assert_same(gradients(recomputed), gradients(plain))


# -- in host memory


class Moves(saved_tensors_hooks):
    """In the place of ``SavedOnHost``: takes down what would be moved."""

    moved: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__(self.pack, lambda tensor: tensor.clone())

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.moved.append(tensor)
        return tensor.detach().clone()


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is moved to host memory."""
    monkeypatch.setattr(activation_checkpointing, "SavedOnHost", Moves)
    monkeypatch.setattr(Moves, "moved", [], raising=False)
    return Moves.moved


def test_inputs_are_moved_to_host_memory_and_parameters_are_not(moved: list[torch.Tensor]) -> None:
    model = net("offload")
    parameter = nn.Parameter(torch.ones(ROWS, WIDTH))
    output = loss(model, parameter)
    assert [tensor.shape for tensor in moved] == [(ROWS, WIDTH)] * 3
    addresses = {each.data_ptr() for each in (*model.parameters(), parameter)}
    assert addresses.isdisjoint(tensor.data_ptr() for tensor in moved)
    output.backward()
    other = nn.Parameter(torch.ones(ROWS, WIDTH))
    expected = gradients(Net(), other)
    assert_same(
        [*(each.grad for each in model.parameters()), parameter.grad], [*expected, other.grad]
    )


def test_moved_inputs_are_not_kept_beside_their_copies(moved: list[torch.Tensor]) -> None:
    model = net("offload")
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
    positional, named = leaf + 1, leaf + 2  # graphs that keep nothing of their results
    references = [weakref.ref(positional), weakref.ref(named)]
    output = model.blocks[0](positional, debug=named)
    assert len(moved) == 2
    moved.clear()
    del positional, named
    assert [reference() for reference in references] == [None, None]
    output.sum().backward()
    assert leaf.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloaded_inputs_leave_the_device() -> None:
    rows = 1 << 16

    def held(kind: str) -> int:
        """Bytes that wait on the device for the backward."""
        model = net(kind).cuda()
        x = torch.randn(rows, WIDTH, device="cuda")
        before = torch.cuda.memory_allocated()
        output = model(x)
        torch.cuda.synchronize()
        bytes_held = torch.cuda.memory_allocated() - before
        output.sum().backward()
        return bytes_held

    assert held("offload") <= held("full") - 3 * rows * WIDTH * 4


# -- the module stays what it was


def test_names_and_signature_stay() -> None:
    recomputed, plain = net("full"), Net()
    assert list(recomputed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in recomputed.named_modules()] == [
        name for name, _ in plain.named_modules()
    ]
    found, expected = recomputed.blocks[0].forward, plain.blocks[0].forward
    assert inspect.signature(found) == inspect.signature(expected)
    assert (found.__name__, found.__doc__) == (expected.__name__, expected.__doc__)


def test_to_choose_a_module_again_changes_nothing() -> None:
    model = net("full")
    saved = saved_numel(model)
    checkpoint_activations(model, ActivationCheckpointing(modules=[Block]))
    assert saved_numel(model) == saved
    output = loss(model)
    with Calls() as calls:
        output.backward()
    assert calls.count["tanh"] == 3


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_recomputes_with_its_own_parameters(kind: str) -> None:
    model = net(kind)
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert_same(gradients(copied), gradients(Net()))
    assert saved_numel(copied) == saved_numel(net(kind))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_module_computes_plainly_and_may_be_chosen_again(kind: str) -> None:
    text = pickle.dumps(net(kind))
    assert b"shardeddp" not in text
    loaded = pickle.loads(text)
    assert_same(gradients(loaded), gradients(Net()))
    checkpoint_activations(loaded, ActivationCheckpointing(modules=[Block]))
    assert saved_numel(loaded) == saved_numel(net("full"))
    assert_same(gradients(loaded), gradients(Net()))


def test_a_forward_of_the_instance_is_kept() -> None:
    model = Net()
    plain = model.blocks[0].forward
    model.blocks[0].forward = lambda x, **arguments: 2 * plain(x, **arguments)
    expected = gradients(model)
    checkpoint_activations(model, ActivationCheckpointing(modules=[Block]))
    assert_same(gradients(model), expected)


def test_hooks_of_the_module_are_not_repeated() -> None:
    model = net("full")
    entered: list[nn.Module] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, _: entered.append(module))
    loss(model).backward()
    assert len(entered) == 3


# -- torch.compile


@pytest.fixture
def compiler() -> Iterator[None]:
    """A compiler that has seen nothing, and forgets what it sees."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The .grad attribute of a Tensor that is not a leaf"
        )  # torch's own reading
        torch.compiler.reset()
        yield
        torch.compiler.reset()


def without_dropout(model: Net) -> Net:
    for block in model.blocks:
        block.dropout.p = 0.0  # its random numbers are the compiler's own
    return model


def compile_blocks(model: Net, backend: str, how: str) -> None:
    for index, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend=backend, fullgraph=True)
        else:
            model.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", ["full", "selective", "policy"])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_compiled_block_recomputes(kind: str, how: str) -> None:
    expected, plain = gradients(without_dropout(Net())), saved_numel(without_dropout(Net()))
    model, eager = without_dropout(net(kind)), without_dropout(net(kind))
    compile_blocks(model, "aot_eager", how)
    assert_same(gradients(model), expected)
    assert saved_numel(eager) <= saved_numel(model) < plain


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", ["full", "selective", "offload"])
def test_a_block_that_was_compiled_before_recomputes(kind: str) -> None:
    expected, plain = gradients(without_dropout(Net())), saved_numel(without_dropout(Net()))
    model = without_dropout(Net())
    compile_blocks(model, "aot_eager", "replaced")
    assert (
        len(checkpoint_activations(model, ActivationCheckpointing(modules=[Block], **KINDS[kind])))
        == 3
    )
    assert_same(gradients(model), expected)
    assert saved_numel(model) < plain


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_inductor_compiles_a_block_that_recomputes() -> None:
    expected = gradients(without_dropout(Net()))
    model = without_dropout(net("selective"))
    compile_blocks(model, "inductor", "in place")
    assert_same(gradients(model), expected)


@pytest.mark.usefixtures("compiler")
def test_offload_inside_of_a_compiled_module_is_refused() -> None:
    model = net("offload")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with pytest.raises(NotImplementedError, match=r"found one inside of a compiled module"):
        loss(model)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
