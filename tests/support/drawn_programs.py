"""Programs that are drawn from a seed: a module graph, a way to train it, and actions of a user between steps.

A program is plain data. Its text says what differs from the plainest program, and is Python that builds it again.
`drawn_model.py` builds its model, `drawn_training.py` its LightningModule, `drawn_comparison.py` trains that twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace

PARTS = {
    "linear": 3,
    "mlp": 3,
    "norm": 3,
    "scale": 3,
    "bias": 2,
    "conv": 1,
    "attention": 1.5,
    "lstm": 1,
    "embedding": 1,
    "prompt": 1.5,
    "unbind": 1.5,
    "slice": 1.5,
    "function": 2,
    "fused": 2,
    "weight_norm": 0.7,
    "standardized": 1.5,
    "cosine": 1.5,
    "inplace": 1.5,
    "relu_": 1,
    "dropout": 1,
    "checkpoint": 1.5,
    "reentrant": 0.7,
    "keeps": 1,
}
"""Layers of a block and what they do with their parameters; the classes are in `drawn_modules.py`."""

OUTPUTS = {
    "plain": 10,
    "tuple": 1.5,
    "dict": 1,
    "view": 1.5,
    "view_inplace": 2,
    "input_inplace": 1.5,
    "attribute": 2.5,
    "list": 2,
    "prompt": 1.5,
    "slice": 1.5,
    "unbind": 1.5,
}
"""In which form a block returns its output, and what else leaves it."""

TERMS = {
    "l2": 2,
    "norm": 1,
    "foreign": 2,
    "function": 2,
    "custom": 2,
    "recorded": 2.5,
    "past": 1.5,
    "detached": 1.5,
    "nograd": 1,
    "teacher": 1.5,
    "penalty": 2,
    "asked": 1,
    "asked_graph": 1.5,
}
"""Losses beside the first; each reads a parameter or a block."""

HOOKS = {
    "tensor": 2,
    "tensor_clamp": 1,
    "post_accumulate": 2,
    "full_backward": 1.5,
    "full_backward_pre": 1,
    "forward": 1.5,
    "forward_pre": 1,
    "activation": 1,
}
"""Hooks on parameters and modules."""

ACTIONS: dict[str, tuple[float, str]] = {
    "read_grad": (2, "after_backward before_step batch_end"),
    "keep_grad": (2, "after_backward before_step batch_end"),
    "scale_grad": (1.5, "after_backward before_step"),
    "assign_grad": (1, "after_backward before_step"),
    "add_kept_grad": (1.5, "before_step"),
    "all_reduce": (0.5, "after_backward before_step"),
    "drop_grad": (1, "after_backward before_step batch_end"),
    "zero_grad": (1, "batch_start batch_end"),
    "zero_grad_in_place": (1, "batch_start batch_end"),
    "mul": (1.5, "step batch_start before_step batch_end"),
    "lerp": (1, "step batch_start before_step batch_end"),
    "copy": (1, "step batch_start batch_end"),
    "data": (1, "step batch_start batch_end"),
    "data_mul": (1, "step batch_start batch_end"),
    "rows": (1, "step batch_start batch_end"),
    "ema": (2, "step before_step batch_end"),
    "keep_view": (1.5, "step batch_start after_backward batch_end"),
    "keep_rows": (1, "step batch_start after_backward batch_end"),
    "keep_data": (1, "step batch_start batch_end"),
    "normalize": (1, "step batch_start batch_end"),
    "renorm": (1, "batch_start batch_end"),
    "toggle": (2, "batch_start"),
    "clip": (1, "before_step"),
    "clip_value": (1, "before_step"),
    "vector": (1, "batch_start batch_end"),
    "state_dict": (1, "batch_start batch_end"),
    "summon": (1, "batch_start batch_end"),
    "summon_write": (1, "batch_start batch_end"),
    "deepcopy": (1, "step batch_start batch_end"),
    "evaluate": (1.5, "step batch_start before_step batch_end"),
    "call": (1, "step batch_start before_step batch_end"),
    "mode": (1, "batch_start"),
    "reset": (1, "batch_end"),
}
"""What a user does between the steps, and in which hooks of the training."""

TIES = {"head": 2, "parameter": 2, "memory": 1}
SHARDING = {
    "full_shard": 4,
    "hybrid_shard": 2,
    "shard_grad_op": 2,
    "shard_optimizer": 2,
    "no_shard": 1.5,
}
RESHARDING = ("full_shard", "hybrid_shard")


class Printed:
    """Text with the fields that are not the default's."""

    def __repr__(self) -> str:
        given = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        texts = [
            f"{f.name}={value!r}"
            for f, value in given
            if f.default is MISSING or value != f.default
        ]
        return f"{type(self).__name__}({', '.join(texts)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Block(Printed):
    """A residual block: its parts are run in turn; a part is a layer's name or a block."""

    parts: tuple[str | Block, ...]
    unit: bool = True
    """Whether the policy "blocks" chooses it."""

    output: str = "plain"
    call: str = "plain"
    """How it is called: "plain", through "checkpoint", or through a "reentrant" one."""

    def blocks(self) -> Iterator[Block]:
        """The block and those inside it."""
        yield self
        for part in self.parts:
            if isinstance(part, Block):
                yield from part.blocks()


Use = tuple[str, int]
"""A kind, and which of the parameters or blocks (by number, counted modulo)."""

Action = tuple[str, str, int]
"""A kind, the hook in which it happens, and which of the parameters or blocks."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Program(Printed):
    """A training to be compared."""

    seed: int
    blocks: tuple[Block, ...]
    width: int = 4
    named: bool = False
    """Blocks in a ModuleDict; else in a ModuleList."""

    calls: tuple[int, ...] = ()
    """Blocks that are called again after the last."""

    ties: tuple[Use, ...] = ()
    """"head": the head has the embedding's weight; "parameter": two parameters are one; "memory": they share memory."""

    frozen: tuple[int, ...] = ()
    terms: tuple[Use, ...] = ()
    main: bool = True
    """Whether the first loss counts; without it the terms alone do."""

    hooks: tuple[Use, ...] = ()
    actions: tuple[Action, ...] = ()

    @property
    def shares_memory(self) -> bool:
        """Whether two of its parameters do."""
        return any(kind == "memory" for kind, _ in self.ties)

    backward: str = "automatic"
    """"automatic"; "manual"; manual for "each" loss; "overridden" with one per loss; two optimizers: "two" on a graph,
    "toggled" in turn."""

    optimizer: str = "sgd"
    scope: bool = False
    """Whether ShardedDP is told that the optimizer is element-wise, where torch does not have it and it is."""

    clip: tuple[str, float] | None = None
    accumulate: int = 1
    reduce_every_backward: bool | None = None
    precision: str = "32-true"
    dropout: float = 0.0
    steps: int = 3
    epochs: int = 1
    sharding: str = "full_shard"
    policy: str | None = "blocks"
    prefetch: tuple[int, int] = (1, 1)
    reshard_after_forward: bool | None = None

    @property
    def ranks(self) -> int:
        """Two, and two times two where replicas are needed."""
        return 4 if self.sharding == "hybrid_shard" else 2

    def all_blocks(self) -> list[Block]:
        """Every block, from the outside to the inside."""
        return [inner for block in self.blocks for inner in block.blocks()]

    def parts(self) -> list[str]:
        """Every layer's name."""
        return [
            part for block in self.all_blocks() for part in block.parts if isinstance(part, str)
        ]

    def uses(self, *names: str) -> bool:
        """Whether any of its choices has one of these names."""
        chosen = {*self.parts(), self.backward}
        chosen |= {word for block in self.all_blocks() for word in (block.call, block.output)}
        chosen |= {use[0] for use in (*self.terms, *self.hooks, *self.actions, *self.ties)}
        return not chosen.isdisjoint(names)


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    blocks = tuple(_block(rng, depth=2) for _ in range(rng.choice([1, 2, 2, 3])))
    number = [0, 0, 1, 1, 2, 3]
    terms = tuple((_one(rng, TERMS), rng.randrange(100)) for _ in range(rng.choice(number)))
    sharding = _one(rng, SHARDING)
    program = Program(
        seed=seed,
        blocks=blocks,
        width=rng.choice([4, 4, 6, 8]),
        named=rng.random() < 0.3,
        calls=tuple(rng.randrange(100) for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))),
        ties=tuple((_one(rng, TIES), rng.randrange(100)) for _ in range(rng.choice([0, 0, 0, 1]))),
        frozen=tuple(rng.randrange(100) for _ in range(rng.choice([0, 0, 0, 1]))),
        terms=terms,
        main=not terms or rng.random() < 0.8,
        hooks=tuple(
            (_one(rng, HOOKS), rng.randrange(100)) for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))
        ),
        actions=tuple(_action(rng) for _ in range(rng.choice(number))),
        backward=_one(
            rng,
            {"automatic": 6, "manual": 1.5, "each": 2, "overridden": 0.5, "two": 1, "toggled": 0.7},
        ),
        optimizer=_one(
            rng, {"sgd": 3, "adamw": 2, "adamw_loop": 1, "remembering": 2, "global_norm": 1}
        ),
        scope=rng.random() < 0.5,
        clip=rng.choice([None, None, None, ("norm", 0.5), ("norm", 0.1), ("value", 0.01)]),
        accumulate=rng.choice([1, 1, 1, 2, 3]),
        reduce_every_backward=rng.choice([None, None, True, False]),
        precision=rng.choice(["32-true", "32-true", "bf16-mixed"]),
        dropout=rng.choice([0.0, 0.2]),
        steps=rng.choice([3, 4]),
        epochs=rng.choice([1, 1, 2]),
        sharding=sharding,
        policy=rng.choice(["blocks", "blocks", "blocks", "auto", None]),
        prefetch=(rng.choice([0, 1, 1, 2]), rng.choice([0, 1, 1, 2])),
        reshard_after_forward=rng.choice([None, None, True, False])
        if sharding in RESHARDING
        else None,
    )
    return legal(program)


def legal(program: Program) -> Program:
    """The program without what PyTorch itself refuses together."""
    if program.backward not in ("automatic", "overridden"):
        program = replace(
            program, clip=None, accumulate=1
        )  # Lightning has neither in manual optimization
    # Reentrant checkpointing is "not compatible with .grad()", and hides the graph from DDP. Another one recomputes
    # where a backward wants what it has not kept; what its function appends then counts twice.
    appends = any(
        inner.output == "list"
        for block in program.all_blocks()
        if block.call == "checkpoint"
        for inner in block.blocks()
    )
    if program.uses("reentrant") or appends:
        gone = ("penalty", "asked", "asked_graph")
        program = replace(program, terms=tuple(use for use in program.terms if use[0] not in gone))
    if program.uses("reentrant"):
        # Each of its backwards ends by itself, with a part of the gradient, where DDP refuses ("marked ready twice").
        program = replace(
            program, hooks=tuple(use for use in program.hooks if use[0] != "post_accumulate")
        )
        # Its inputs are leaves and its outputs those of a custom Function: neither is changed in place.
        program = replace(
            program, blocks=tuple(_without_inplace(block) for block in program.blocks)
        )
    if not program.terms:
        program = replace(program, main=True)
    if (
        program.backward == "each"
    ):  # what is written between two backwards of a graph, autograd misses
        writes = (
            "scale_grad",
            "assign_grad",
            "drop_grad",
            "read_grad",
            "keep_grad",
            "keep_view",
            "keep_rows",
        )
        safe = tuple(a for a in program.actions if a[1] != "after_backward" or a[0] in writes)
        program = replace(program, actions=safe)
    return program


def _without_inplace(block: Block) -> Block:
    parts = tuple(part if isinstance(part, str) else _without_inplace(part) for part in block.parts)
    return replace(
        block, parts=parts, output="plain" if "inplace" in block.output else block.output
    )


def _one(rng: random.Random, weights: dict[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _block(rng: random.Random, depth: int) -> Block:
    parts: list[str | Block] = [_one(rng, PARTS) for _ in range(rng.choice([1, 2, 2, 3]))]
    for _ in range(rng.choice([0, 0, 1, 1, 2]) if depth else 0):
        parts.insert(rng.randrange(len(parts) + 1), _block(rng, depth - 1))
    if depth and rng.random() < 0.1:
        parts = [part for part in parts if isinstance(part, Block)] or parts
    return Block(
        parts=tuple(parts),
        unit=rng.random() < 0.8,
        output=_one(rng, OUTPUTS),
        call=rng.choices(["plain", "checkpoint", "reentrant"], [8, 1, 0.5])[0],
    )


def _action(rng: random.Random) -> Action:
    kind = rng.choices(list(ACTIONS), [weight for weight, _ in ACTIONS.values()])[0]
    return kind, rng.choice(ACTIONS[kind][1].split()), rng.randrange(100)
