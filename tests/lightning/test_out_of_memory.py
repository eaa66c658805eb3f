"""An error for want of memory keeps its type and says what was held, what was planned, and what to change."""

import errno
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardeddp import ShardedDP
from shardeddp.config import parse_options
from shardeddp.engine.storage import GatheredBuffer
from shardeddp.lightning.out_of_memory import advice, explain_memory, is_out_of_memory
from shardeddp.report import human_bytes
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import make_trainer
from training import Sharding
from world import Worlds, on_ranks

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
]

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Needs(TinyGpt):
    """A module that runs out of memory in its third step."""

    where = "forward"
    error: BaseException = torch.cuda.OutOfMemoryError(TEXT)

    def _need(self, where: str) -> None:
        if where == self.where and self.trainer.global_step == 2:
            raise self.error

    def loss(self, batch: Any) -> Tensor:
        """The loss; the second block may want memory."""
        handle = self.blocks[1].up.register_forward_pre_hook(lambda *_: self._need("forward"))
        loss = super().loss(batch)
        handle.remove()
        loss.register_hook(lambda _: self._need("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """In the step."""
        self._need("optimizer")


def told(
    where: str, error: BaseException, strategy: str = "full_shard"
) -> tuple[str, int, int, dict[str, str]]:
    """The text of an error, bytes of main shards and optimizer states as planned, and pictures."""
    sharded, task = ShardedDP(strategy, auto_wrap_policy={Block}), Needs()
    task.where, task.error = where, error
    with TemporaryDirectory() as directory:
        trainer = make_trainer(sharded, max_steps=4, default_root_dir=f"{directory}/runs")
        with pytest.raises(type(error)) as caught:
            trainer.fit(task, token_loader(32))
        pages = {str(it): it.read_text() for it in Path(directory).glob("runs/*.html")}
    assert caught.value is error
    plan = sharded.memory_plan
    return str(error), plan.main_shard_nbytes, plan.optimizer_nbytes, pages


def row(text: str, name: str) -> list[str]:
    """Cells of a row of the table."""
    [line] = [line for line in text.splitlines() if line.startswith(name)]
    return [cell.strip() for cell in line.removeprefix(name).split("  ") if cell.strip()]


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_the_text_goes_on_with_what_is_held_and_what_was_planned(world: Worlds, where: str) -> None:
    found = world(2).run(told, where, torch.cuda.OutOfMemoryError(TEXT))
    for rank, (text, main, states, pages) in enumerate(found):
        assert text.startswith(f"{TEXT}\n\nMemory of this rank")
        assert text.count("Memory of this rank") == 1
        assert row(text, "main shards") == [human_bytes(main)] * 2
        # Two states of Adam per element, and its step counts.
        assert row(text, "optimizer states")[1] == human_bytes(states)
        assert row(text, "gradient shards")[0] != "0 B"
        is_forward = where == "forward"
        assert ("It was in the forward of blocks.1 (1.16 KiB gathered)" in text) is is_forward
        [gathered] = [line for line in text.splitlines() if line.startswith("Gathered units")]
        assert ("blocks.2 (" in gathered) is (where != "optimizer"), "ahead, or kept for backward"
        assert "activation_checkpointing" in text
        [(path, page)] = pages.items()
        assert path.endswith(f"out-of-memory-rank-{rank}.html")
        assert text.endswith(f"This memory by unit, as a picture: {path}")
        assert f"Out of memory: rank {rank}" in page and "Tried to allocate 2.00 GiB" in page
        for kind in ("parameters", "gradients", "optimizer"):
            assert f"<title>{kind}, blocks.1: " in page
        assert ("units in flight, blocks.2" in page) is (where != "optimizer")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 5 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_want_of_memory_on_the_host_and_of_libraries_is_explained_too(
    world: Worlds, error: BaseException
) -> None:
    for text, *_ in world(1).run(told, "forward", error):
        assert "main shards" in text
        assert text.startswith(str(error))


class TwoDtypes(nn.Module):
    """A unit of two flat buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., 4) to the same."""
        return x + self.down(self.up(x).double()).float()


@pytest.mark.parametrize("at", range(2, 6))
@on_ranks(2)
def test_a_gather_without_memory_ends_in_that_error_and_the_next_step_runs(at: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(TwoDtypes() for _ in range(3)))
    runtime = Sharding(units=("1", "2", "3")).apply(model)
    allocate, calls = GatheredBuffer.allocate, 0

    def fails_once(buffer: GatheredBuffer) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise torch.cuda.OutOfMemoryError(TEXT)
        return allocate(buffer)

    def step() -> Tensor:
        with runtime.step() as outputs:
            outputs.append(model(torch.ones(2, 4)).sum())
        outputs[0].backward()
        return outputs[0].detach()

    expected = step()
    with mock.patch.object(GatheredBuffer, "allocate", fails_once):
        with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
            step()
        assert torch.equal(step(), expected)


@on_ranks(1)
def test_other_errors_stay_as_they_are() -> None:
    text, *_, pages = told("forward", RuntimeError("shapes differ"))
    assert text == "shapes differ" and not pages


def test_a_table_that_cannot_be_made_hides_nothing() -> None:
    def fails(error: BaseException) -> list[str]:
        raise KeyError("units")

    error = MemoryError("no room")
    explain_memory(error, fails)
    assert str(error).startswith("no room\n")
    assert "not counted: KeyError" in str(error)


def refused(where: str, wraps: bool) -> tuple[str, list[str]]:
    """Message of an error in a hook that is not of a step, and names of the pictures."""

    class Hooked(TinyGpt):
        pass

    def needs(*_: Any) -> None:
        error = torch.cuda.OutOfMemoryError(TEXT)
        if wraps:
            raise ValueError("batch 3") from error
        raise error

    setattr(Hooked, where, needs)
    with TemporaryDirectory() as directory:
        trainer = make_trainer(
            ShardedDP("shard_optimizer", auto_wrap_policy={Block}),
            max_steps=4,
            default_root_dir=directory,
        )
        with pytest.raises(ValueError if wraps else torch.cuda.OutOfMemoryError) as caught:
            trainer.fit(Hooked(), token_loader(32))
        names = sorted(it.name for it in Path(directory).glob("*.html"))
    return f"{caught.value} {caught.value.__cause__ or ''}", names


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("where", ["on_train_batch_start", "on_train_epoch_end", "training_step"])
@on_ranks(1)
def test_errors_of_all_hooks_are_explained_and_drawn_also_as_a_cause(
    where: str, wraps: bool
) -> None:
    text, names = refused(where, wraps)
    assert text.count("main shards") == 1 and text.count("as a picture") == 1
    assert names == ["out-of-memory-rank-0.html"]


@on_ranks(2)
def test_the_text_says_how_much_less_full_shard_takes_as_planned() -> None:
    text, _ = refused("on_train_batch_start", wraps=False)
    sharded = [
        ShardedDP(name, auto_wrap_policy={Block}) for name in ("shard_optimizer", "full_shard")
    ]
    for strategy in sharded:
        make_trainer(strategy, max_steps=1).fit(TinyGpt(), token_loader(32))
    kept, full = (it.memory_plan.peak_nbytes for it in sharded)
    assert kept > full
    assert f"shard_optimizer takes {human_bytes(kept - full)} more" in text


class ManualNeeds(TinyGpt):
    """Manual optimization, whose steps cannot be repeated; the message has a byte that is no UTF-8."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_index: int) -> Any:
        """Run out of memory."""
        raise torch.cuda.OutOfMemoryError(f"{TEXT} for data/\udce9.bin")


@on_ranks(2)
def test_only_steps_that_can_be_repeated_are_advised_to_be_and_any_message_is_drawn() -> None:
    with TemporaryDirectory() as directory:
        trainer = make_trainer(
            ShardedDP("no_shard", auto_wrap_policy={Block}),
            max_steps=4,
            default_root_dir=directory,
        )
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
            trainer.fit(ManualNeeds(), token_loader(32))
        (path,) = Path(directory).glob("*.html")
        assert "data/\\udce9.bin" in path.read_text(encoding="utf-8")
    text = str(caught.value)
    assert "What takes less memory" in text and "not counted" not in text
    assert "ReshardOnOutOfMemory" not in text


class Mute(RuntimeError):
    """An error without a message."""

    def __str__(self) -> str:
        return "code " + self.args[0]


class Fixed(MemoryError):
    """An error that takes neither other arguments nor notes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def add_note(self, note: str) -> None:
        """Refuse it."""
        raise AttributeError("note")


def test_errors_of_odd_classes_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    mute, fixed, noted = Mute(3), Fixed("no room"), MemoryError("no room")
    noted.__notes__ = None  # type: ignore[assignment]
    for error in (mute, fixed, noted):
        explain_memory(error, lambda _: ["the table"])
    assert mute.args == (3,) and fixed.args == ("no room",)
    assert "the table" in caplog.text and "the table" in str(noted)


@pytest.mark.parametrize(
    "error", [RuntimeError("std::bad_alloc"), OSError(errno.ENOMEM, "Cannot allocate memory")]
)
def test_want_of_memory_of_the_system_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))


class Computed(RuntimeError):
    """An error that makes its message of a number."""

    def __str__(self) -> str:
        return f"out of memory by {self.args[0] + 1} GiB"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
def test_a_message_that_an_error_makes_itself_is_kept() -> None:
    for error, text in (
        (Computed(3), "out of memory by 4 GiB"),
        (MemoryError("no room", 3), "('no room', 3)"),
    ):
        args = error.args
        for _ in range(2):
            explain_memory(error, lambda _: ["the table"])
        assert str(error) == text and error.args == args
        [note] = getattr(error, "__notes__")  # noqa: B009
        assert note.startswith("Memory of this rank") and note.endswith("the table")


def test_what_is_set_already_is_not_advised() -> None:
    gpu, host = torch.device("cuda"), torch.device("cpu")
    plain = "\n".join(advice(parse_options({"sharding_strategy": "shard_grad_op"}), gpu))
    for text in ("micro-batch", "activation_checkpointing", "full_shard", "CPUOffload(optimizer"):
        assert text in plain
    assert "ReshardOnOutOfMemory" in plain
    options = parse_options({"sharding_strategy": "no_shard"})
    assert "ReshardOnOutOfMemory" not in "\n".join(advice(options, gpu, may_repeat=False))
    done = parse_options({"cpu_offload": True})
    assert "cpu_offload" not in "\n".join(advice(done, gpu))
    assert "cpu_offload" not in "\n".join(advice(parse_options({}), host))
    kept = parse_options({"reshard_after_forward": False})
    assert "reshard_after_forward=True" in "\n".join(advice(kept, gpu))
