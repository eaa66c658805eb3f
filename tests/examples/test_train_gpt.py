"""Tests of the example's model, data and figures, in one process."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.data import PydocText, Windows, corpus, decode, encode
from gpt.memory import state_nbytes
from gpt.model import GPT, GPTModule, decay_groups, rotary_table, rotate, warmup_then_cosine
from gpt.report import StepMeter, print_closing_table
from gpt.sampling import TextSampler

pytestmark = pytest.mark.timeout(30)

VOCAB = 256
LENGTH = 16


@pytest.fixture
def module() -> GPTModule:
    """A model small enough to differentiate in milliseconds."""
    torch.manual_seed(0)
    return GPTModule(dim=32, num_layers=2, num_heads=2, learning_rate=1e-2, warmup_steps=2)


@pytest.fixture
def tokens() -> Tensor:
    """Random bytes, shape (2, LENGTH)."""
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def test_rope_products_depend_only_on_the_distance_of_positions() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_table(LENGTH, head_dim=8, device=torch.device("cpu"))
    queries = rotate(query.expand(1, 1, LENGTH, 8), cos, sin)[0, 0]
    keys = rotate(key.expand(1, 1, LENGTH, 8), cos, sin)[0, 0]
    products = queries @ keys.T
    for distance in range(-LENGTH + 1, LENGTH):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert not torch.allclose(products[0], products[0, :1].expand(LENGTH)), (
        "positions make no difference at all"
    )


def test_rope_leaves_lengths_and_the_first_position_alone() -> None:
    x = torch.randn(2, 3, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    rotated = rotate(x, *rotary_table(LENGTH, head_dim=8, device=torch.device("cpu")))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotated[:, :, 0], x[:, :, 0])


@pytest.mark.parametrize("position", [1, LENGTH // 2, LENGTH - 1])
def test_a_changed_token_changes_no_earlier_logits(
    module: GPTModule, tokens: Tensor, position: int
) -> None:
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % VOCAB
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=0)
    assert not torch.equal(before[:, position], after[:, position])


def test_input_and_output_embedding_are_one_parameter(module: GPTModule) -> None:
    assert module.gpt.head.weight is module.gpt.embedding.weight
    names = [name for name, _ in module.named_parameters()]
    assert "gpt.embedding.weight" in names
    assert "gpt.head.weight" not in names
    assert {"gpt.embedding.weight", "gpt.head.weight"} <= module.state_dict().keys()


def test_optimizer_groups_hold_every_parameter_once_and_decay_matrices_only(
    module: GPTModule,
) -> None:
    decayed, kept = decay_groups(module, weight_decay=0.1)
    grouped = [*decayed["params"], *kept["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, module.parameters()))
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])
    assert all(parameter.ndim < 2 for parameter in kept["params"])


def test_optimizer_groups_leave_frozen_parameters_out(module: GPTModule) -> None:
    module.gpt.blocks[0].requires_grad_(False)
    grouped = [parameter for group in decay_groups(module, 0.1) for parameter in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in module.parameters() if p.requires_grad}


def test_gradients_reach_every_parameter(module: GPTModule, tokens: Tensor) -> None:
    F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
    without = [
        name
        for name, p in module.named_parameters()
        if p.grad is None or not p.grad.abs().sum() > 0
    ]
    assert without == []


def test_first_loss_is_that_of_a_guess(module: GPTModule, tokens: Tensor) -> None:
    loss = F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(VOCAB), rel=0.05)


def test_loss_falls_within_a_few_steps(module: GPTModule) -> None:
    text = encode(corpus())
    windows = Windows(text, block_size=32, stride=32)
    inputs, targets = (
        torch.stack(column) for column in zip(*(windows[index] for index in range(16)), strict=True)
    )
    optimizer = torch.optim.AdamW(decay_groups(module, 0.1), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_generate_keeps_the_prompt_repeats_itself_and_leaves_the_global_generator_alone(
    module: GPTModule, tokens: Tensor
) -> None:
    state = torch.get_rng_state()
    first, second = (module.generate(tokens, num_tokens=5, context=8) for _ in range(2))
    assert first.shape == (2, LENGTH + 5)
    assert torch.equal(first[:, :LENGTH], tokens)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_heads_of_odd_width_are_refused_with_a_width_that_fits() -> None:
    with pytest.raises(ValueError, match=r"found dim=30 and num_heads=2: .* 32"):
        GPT(VOCAB, dim=30, num_layers=1, num_heads=2)


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    factors = [warmup_then_cosine(step, warmup_steps=4, total_steps=20) for step in range(25)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert all(later < earlier for earlier, later in pairwise(factors[4:21]))
    assert factors[20:] == pytest.approx([0.1] * 5)


def test_text_survives_encoding_and_decoding() -> None:
    text = corpus()
    tokens = encode(text)
    assert decode(tokens) == text
    assert 0 <= tokens.min() <= tokens.max() < VOCAB
    assert len(tokens) > 200_000, "the corpus has shrunk to less than the demo needs"


def test_bytes_that_are_no_text_decode_to_the_replacement_character() -> None:
    assert decode(torch.tensor([72, 255, 105])) == "H\N{REPLACEMENT CHARACTER}i"


def test_windows_hold_the_text_and_their_targets_are_one_byte_ahead() -> None:
    windows = Windows(torch.arange(11), block_size=4, stride=3)
    pairs = [
        (inputs.tolist(), targets.tolist())
        for inputs, targets in (windows[i] for i in range(len(windows)))
    ]
    assert pairs == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([6, 7, 8, 9], [7, 8, 9, 10]),
    ]


def test_a_text_shorter_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than block_size=4 tokens, found 4"):
        Windows(torch.arange(4), block_size=4, stride=1)


def test_validation_text_is_not_trained_on() -> None:
    data = PydocText(block_size=64, batch_size=4)
    data.setup("fit")
    trained, held_out = decode(data.train_windows.tokens), decode(data.validation_windows.tokens)
    assert trained + held_out == corpus()
    paragraphs = {p.strip() for p in held_out.split("\n\n") if len(p.strip()) > 80}
    repeated = [paragraph for paragraph in paragraphs if paragraph in trained]
    assert len(repeated) < 0.1 * len(paragraphs)


def test_state_counts_parameters_gradients_and_moments_and_a_tied_weight_once() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    assert state_nbytes(model, optimizer) == 2 * 256  # weight and gradient of 64 floats each
    optimizer.step()
    assert state_nbytes(model, optimizer) == 4 * 256 + 4  # two moments more, and the step's number


def test_a_fit_is_measured_in_optimizer_steps_ended_after_them_and_sampled(
    module: GPTModule, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    meter = StepMeter("plain", num_steps=3, warmup_steps=1, stop=True)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        limit_val_batches=0,
        callbacks=[meter, TextSampler(num_tokens=4, context=8)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, PydocText(block_size=8, batch_size=2))
    assert trainer.global_step == 4
    figures = meter.figures
    assert figures is not None
    assert (figures.num_steps, figures.last_step, figures.sent_nbytes) == (3, 4, 0)
    assert figures.loss == pytest.approx(math.log(VOCAB), rel=0.2)
    assert figures.tokens_per_s * figures.step_time_s == pytest.approx(
        2 * 2 * 8
    )  # batches, samples, bytes
    counters = 4 * len(list(module.parameters()))
    assert figures.state_nbytes == 4 * sum(p.nbytes for p in module.parameters()) + counters
    print_closing_table(figures, figures, tmp_path)
    out = capsys.readouterr().out
    assert "steps 2 to 4" in (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "<svg" in (tmp_path / "report.svg").read_text(encoding="utf-8")
    assert "The " in out, "no sample was printed"
    assert "steps 2 to 4" in out
    assert "1.000" in out


def test_a_meter_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="found num_steps=0 and warmup_steps=5"):
        StepMeter("plain", num_steps=0)
