"""Many drawn programs, and the smallest program that fails as one of them does.

From the command line, in `tests/`::

PYTHONPATH=../src:. python -m support.drawn_survey 17 20-29 --shrink
PYTHONPATH=../src:. python -m support.drawn_survey --program "Program(seed=1, blocks=(Block(parts=('mlp',)),))"
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from support.drawn_comparison import RANKS_RUN, Outcome, run
from support.drawn_model import DrawnModel
from support.drawn_programs import Block, Program, draw, legal
from support.drawn_variations import simpler, singles
from world import Pool


def _kind(outcome: Outcome) -> str:
    """What stays the same while a program is made smaller."""
    return f"{outcome.kind} {re.sub(r'[0-9.]+', '', outcome.text)[:60] if outcome.kind == 'raises' else ''}"


def shrink(
    pool: Pool, program: Program, outcome: Outcome, seconds: float = 90.0
) -> tuple[Program, Outcome]:
    """A smaller program that fails in the same way, by leaving out one thing at a time."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for candidate in simpler(program):
            if time.monotonic() > end:
                break
            if candidate == program:
                continue
            found = run(pool, candidate)
            if found.failed and _kind(found) == _kind(outcome):
                program, outcome, progress = candidate, found, True
                break
    return program, outcome


def explain(program: Program) -> str:
    """A program with the names that its numbers stand for."""
    module = DrawnModel(program)
    lines = [repr(program)]
    for use in (*program.terms, *program.hooks, *program.actions):
        number = int(use[-1])
        block = module.block_names[number % len(module.block_names)]
        lines.append(f"    {use}: parameter {module.name(number)}, block {block}")
    return "\n".join(lines)


def seeds(words: Iterable[str]) -> Iterator[int]:
    """The numbers of ``3 10-19``."""
    for word in words:
        first, _, last = word.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="*")
    parser.add_argument("--program", help="the text of a program")
    parser.add_argument("--shrink", type=float, nargs="?", const=90.0, help="seconds for each")
    parser.add_argument(
        "--singles", help='each choice alone, with these changes: "policy=None, accumulate=2"'
    )
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--json", help="file to which every outcome is appended")
    options = parser.parse_args()
    pool, counts = Pool(), dict[str, int]()
    # A program that fails ends its ranks: the next ones have imported everything when they are forked.
    multiprocessing.set_forkserver_preload(
        ["lightning.pytorch", "pytest", "shardeddp", "support.drawn_training"]
    )
    programs = [draw(seed) for seed in seeds(options.seeds)]
    if options.program:
        programs.append(eval(options.program, {"Program": Program, "Block": Block}))
    if options.singles is not None:
        changes = eval(f"dict({options.singles})")
        programs += [legal(replace(program, **changes)) for program in singles()]
    begin = time.monotonic()
    for number, program in enumerate(programs):
        if number % RANKS_RUN == 0:
            pool.kill()  # the next program starts new ones
        start = time.monotonic()
        outcome = run(pool, program)
        took = time.monotonic() - start
        counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
        shown = (
            repr(program)
            if options.singles is not None and outcome.kind != "same"
            else program.seed
        )
        print(f"{shown}: {outcome.kind} {outcome.text[:600]} [{took:.1f} s]", flush=True)
        if options.details and outcome.details:
            print(outcome.details[-2500:])
        small, last = program, outcome
        if outcome.failed and options.shrink:
            small, last = shrink(pool, program, outcome, options.shrink)
            print(f"    {last.kind}: {last.text[:600]}\n    {explain(small)}", flush=True)
        if options.json:
            with open(options.json, "a") as file:
                entry = {
                    "seed": program.seed,
                    "kind": outcome.kind,
                    "text": outcome.text,
                    "program": repr(program),
                }
                entry |= {
                    "small": repr(small),
                    "small_text": last.text,
                    "details": last.details[-3000:],
                }
                file.write(json.dumps(entry) + "\n")
    print(
        counts,
        f"{(time.monotonic() - begin) / max(1, len(programs)):.2f} s per program",
        file=sys.stderr,
    )
    pool.close()


if __name__ == "__main__":
    main()
