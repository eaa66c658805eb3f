"""Variations of drawn programs: every program that is a little simpler than one, and every choice alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace

from support.drawn_programs import ACTIONS, HOOKS, OUTPUTS, PARTS, TERMS, Block, Program, legal

SEQUENCES = ("actions", "hooks", "terms", "calls", "ties", "frozen")


def simpler(program: Program) -> Iterator[Program]:
    """Every program that has one thing less, after those that have several less."""
    plain = {field.name: field.default for field in fields(program) if field.default is not MISSING}
    yield legal(
        replace(
            program,
            **{name: value for name, value in plain.items() if name not in (*SEQUENCES, "main")},
        )
    )
    yield legal(replace(program, **{name: () for name in SEQUENCES}))
    for block in program.blocks if len(program.blocks) > 1 else ():
        yield legal(replace(program, blocks=(block,)))
    for name in SEQUENCES:
        chosen = getattr(program, name)
        if len(chosen) > 1:
            yield legal(replace(program, **{name: ()}))
        for index in range(len(chosen)):
            yield legal(replace(program, **{name: chosen[:index] + chosen[index + 1 :]}))
    for blocks in _fewer(program.blocks, least=1):
        yield legal(replace(program, blocks=blocks))
    for name, value in plain.items():
        if name not in SEQUENCES and getattr(program, name) != value:
            yield legal(replace(program, **{name: value}))
    if program.steps > 1:
        yield replace(program, steps=program.steps - 1)


def _fewer(parts: tuple[str | Block, ...], least: int = 0) -> Iterator[tuple]:
    """The same sequence with one part or choice less, at any depth."""
    for index, part in enumerate(parts):
        before, after = parts[:index], parts[index + 1 :]
        if len(parts) > least:
            yield before + after
        if isinstance(part, Block):
            if least == 0:
                yield (*before, *part.parts, *after)
            inner = [p for p in part.parts if isinstance(p, Block)]
            if least == 1 and inner:
                yield (*before, *inner, *after)
            for plain in (
                replace(part, output="plain"),
                replace(part, call="plain"),
                replace(part, unit=True),
            ):
                if plain != part:
                    yield (*before, plain, *after)
            for fewer in _fewer(part.parts):
                yield (*before, replace(part, parts=fewer), *after)


def singles() -> Iterator[Program]:
    """A plain program with each of the choices alone."""
    block = Block(parts=("norm", "mlp"))
    plain = Program(seed=1, blocks=(block, block))
    yield plain
    for part in PARTS:
        yield replace(plain, blocks=(Block(parts=(part, "mlp")), block))
    for output in OUTPUTS:
        yield replace(plain, blocks=(replace(block, output=output), block))
        yield replace(plain, blocks=(Block(parts=("scale", replace(block, output=output))), block))
    for how in ("checkpoint", "reentrant"):
        yield replace(plain, blocks=(replace(block, call=how), block))
        yield replace(plain, blocks=(Block(parts=("scale", replace(block, call=how))), block))
    for tie in ("head", "parameter", "memory"):
        yield replace(plain, ties=((tie, 2),))
    for kind in TERMS:
        for number in (0, 4):  # of the root, of a block
            for main in (True, False):
                yield replace(plain, terms=((kind, number),), main=main)
    for kind in HOOKS:
        for number in (4, 6):  # before the sharding, and after it
            yield replace(plain, hooks=((kind, number),))
    for kind, (_, places) in ACTIONS.items():
        for place in places.split():
            for number in (0, 4):
                yield replace(plain, actions=((kind, place, number),))
    for backward in ("manual", "each", "overridden", "two", "toggled"):
        yield replace(plain, backward=backward, terms=(("l2", 4), ("recorded", 0)))
    for optimizer in ("adamw", "adamw_loop", "remembering", "global_norm"):
        yield replace(plain, optimizer=optimizer)
    yield replace(plain, optimizer="remembering", scope=True)
    yield replace(plain, frozen=(0,))
    yield replace(plain, calls=(0,))
    for clip in (("norm", 0.1), ("value", 0.01)):
        yield replace(plain, clip=clip)
