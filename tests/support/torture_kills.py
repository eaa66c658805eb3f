"""Kills ranks of a training in the middle of saving, and looks at what is left; ranks are forked, so it is quick."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from shardeddp.checkpoint.clean import remove_leftovers
from shardeddp.checkpoint.find import WORKING_NAME, find_checkpoints
from shardeddp.comm import propagation
from support.torture_training import (
    RANKS,
    STEPS,
    Board,
    Phase,
    Picture,
    Reporter,
    digest,
    export_all,
    fork_rank,
    picture_of,
    start_another,
    train,
)

FOREIGN = {
    "notes.txt": "mine",
    ".tmp-notes": "mine",
    ".del-notes": "mine",
    ".old-last.ckpt-1": "mine",
    "data/step=3": "mine",
    ".hidden/x": "mine",
}
"""Files that are nobody's business, by name."""

EXPORTED = "exported.ckpt"

SAVES = 10
"""Of a training that keeps two checkpoints and the last."""

PATIENCE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """When which ranks are killed."""

    seed: int
    asynchronous: bool
    resumes: bool
    """Whether a new training goes on afterwards, to the end; else what it would find is looked at."""

    company: bool = False
    """Whether other Trainers start in the folder and an export writes into it; killed as well."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a trial; ``problem`` is empty if all promises were kept."""

    trial: Trial
    problem: str
    killed: tuple[int, ...]
    phases: tuple[str, ...]
    """Of the killed, at that moment."""

    in_save: bool
    returned: int
    """Step of the newest save that had returned on some rank."""

    found: int
    """Step that the next start takes."""

    leftovers: int
    """Entries that the killed had left."""

    survivors_s: float
    """How long the others went on."""

    hung: int
    """Survivors that had to be killed."""

    company: str
    """How often a Trainer was started beside and an export finished; the refusals of both."""

    seconds: float


class Runner:
    """Runs trials; in a process that has everything loaded and has never used a process group."""

    def __init__(self, root: Path, sharding: str) -> None:
        self._root = root
        self._sharding = sharding
        self._ranks = RANKS[sharding]
        self._board = Board(self._ranks)
        self._worlds = 0
        self._expected: dict[int, Picture] = {}
        self._final = ""
        self._save_s, self._training_s = 0.0, 0.0

    def learn(self) -> None:
        """Train without being disturbed: what a checkpoint of each step holds, and how long a save takes."""
        folder = self._root / "undisturbed"
        children = self._start(folder, asynchronous=False, keep=-1)
        self._watch(children, lambda: self._board.read(0).training)
        began = last = time.monotonic()
        saving = 0.0
        while not all(map(_has_ended, children)):
            now = time.monotonic()
            saving += (now - last) * self._board.read(0).saving
            last = now
            time.sleep(0.0005)
        assert self._reap(children, PATIENCE_S) == ([0] * self._ranks, 0), (
            folder / "log-0"
        ).read_text()
        self._training_s = time.monotonic() - began
        self._save_s = saving / self._board.read(0).begun
        digests = dict(line.split() for line in (folder / "digests-0").read_text().splitlines())
        for found in find_checkpoints(folder / "checkpoints").checkpoints:
            self._expected[found.step] = picture_of(found.path)
            assert self._expected[found.step].step == found.step
            assert self._expected[found.step].weights == digests[str(found.step)], (
                "not the weights of that step"
            )
        assert len(self._expected) == STEPS // 2
        self._final = digests[str(STEPS)]

    def run(self, trial: Trial) -> Outcome:
        """Train, kill, and look."""
        began = time.monotonic()
        folder = self._root / f"trial-{trial.seed}"
        draw = random.Random(trial.seed)
        children = self._start(folder, trial.asynchronous)
        company = self._start_company(folder) if trial.company else []
        everyone = tuple(range(self._ranks))
        killed = draw.choice([(0,), (1,), (0, 1), everyone[-1:], everyone])
        self._wait_for_the_moment(draw, children)
        phases = self._kill(killed, children)
        dead = time.monotonic()
        _, hung = self._reap(children, PATIENCE_S)
        survivors_s = time.monotonic() - dead
        time.sleep(draw.random() * 0.2 if company else 0.0)
        self._reap(company, 0.0)
        problem, company_text, returned, found, leftovers = "", "", 0, 0, 0
        try:
            leftovers = sum(
                WORKING_NAME.fullmatch(name) is not None
                for name in os.listdir(folder / "checkpoints")
            )
            company_text = self._inspect_company(folder) if trial.company else ""
            returned, found = self._inspect(folder, trial)
        except Exception:  # noqa: BLE001 - a finding, to be shown with the rest
            problem = traceback.format_exc()
        else:
            shutil.rmtree(folder)
        return Outcome(
            trial=trial,
            problem=problem,
            killed=killed,
            phases=tuple(map(str, phases)),
            in_save=any(phase.saving for phase in phases),
            returned=returned,
            found=found,
            leftovers=leftovers,
            survivors_s=survivors_s,
            hung=hung,
            company=company_text,
            seconds=time.monotonic() - began,
        )

    def _wait_for_the_moment(self, draw: random.Random, children: Sequence[int]) -> None:
        """Mostly in a save: its number is drawn, and how far it gets; else at any time of the training."""
        number, share, watched = draw.randint(1, SAVES), draw.random(), draw.randrange(self._ranks)
        if draw.random() < 0.85:
            self._watch(children, lambda: self._board.read(watched).begun >= number)
            time.sleep(1.1 * share * self._save_s)
        else:
            self._watch(children, lambda: self._board.read(watched).training)
            until = time.monotonic() + share * self._training_s
            self._watch(children, lambda: time.monotonic() >= until)

    def _watch(self, children: Sequence[int], reached: Callable[[], bool]) -> None:
        """Return when it is so, or when some rank has ended by itself."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached() and not any(map(_has_ended, children)) and time.monotonic() < deadline:
            time.sleep(0.0003)

    def _kill(self, ranks: Sequence[int], children: Sequence[int]) -> list[Phase]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[rank], signal.SIGKILL)
        return [self._board.read(rank) for rank in ranks]

    def _inspect(self, folder: Path, trial: Trial) -> tuple[int, int]:
        """Hold what is there against the promises."""
        checkpoints = folder / "checkpoints"
        noted = [
            line.split()
            for rank in range(self._ranks)
            for line in (folder / f"notes-{rank}").read_text().splitlines()
        ]
        returned = max((int(step) for what, step in noted if what == "returned"), default=0)
        begun = max((int(step) for what, step in noted if what == "begun"), default=0)
        cleaned_by_hand = not trial.resumes
        if cleaned_by_hand:
            assert remove_leftovers(checkpoints) == ()
        found = find_checkpoints(checkpoints)
        assert found.skipped == {}, f"what looks like a checkpoint is none: {found.skipped}"
        path = found.checkpoints[-1].path if found.checkpoints else None
        step = 0
        for candidate in found.checkpoints:
            assert picture_of(candidate.path) == self._expected[candidate.step], (
                f"{candidate.name} is wrong"
            )
        if path is not None:
            step = picture_of(path).step
        assert returned <= step <= begun, (
            f"step {step} is taken, {returned} had returned, {begun} had begun"
        )
        if trial.resumes:
            self._resume(folder, path, trial.asynchronous)
        left = [name for name in os.listdir(checkpoints) if WORKING_NAME.fullmatch(name)]
        assert left == [], f"leftovers after the next start: {left}"
        for name, text in FOREIGN.items():
            assert (checkpoints / name).read_text() == text
        return returned, step

    def _start_company(self, folder: Path) -> list[int]:
        """Fork a process that starts Trainers in the folder, and one that exports from it."""
        checkpoints = folder / "checkpoints"
        actions = {
            "trainer": partial(start_another, checkpoints),
            "export": partial(export_all, checkpoints, checkpoints / EXPORTED),
        }
        self._worlds += 1
        return [
            fork_rank(
                0, 1, self._root / f"store-{self._worlds}-{name}", folder / f"log-{name}", action
            )
            for name, action in actions.items()
        ]

    def _inspect_company(self, folder: Path) -> str:
        """What the others did; an export that is there is the weights of some step, whole."""
        lines = [
            line
            for name in ("trainer", "export")
            for line in (folder / f"log-{name}").read_text().splitlines()
        ]
        wrong = [line for line in lines if "Traceback" in line or "Error" in line]
        assert wrong == [], "\n".join(lines)
        exported = folder / "checkpoints" / EXPORTED
        if exported.exists():
            loaded = torch.load(exported, weights_only=True)
            expected = self._expected[loaded["global_step"]].weights
            assert digest(dict(loaded["state_dict"])) == expected, "the export is wrong"
            exported.unlink()
        refused = sum(line.startswith("refused") for line in lines)
        return f"{lines.count('started')} {lines.count('exported')} {refused}"

    def _resume(self, folder: Path, path: Path | None, asynchronous: bool) -> None:
        children = self._start(folder, asynchronous, path)
        codes, _ = self._reap(children, 2 * PATIENCE_S)
        assert codes == [0] * self._ranks, (folder / "log-0").read_text()
        digests = dict(line.split() for line in (folder / "digests-0").read_text().splitlines())
        assert digests.get(str(STEPS), self._final) == self._final, (
            "the resumed run ends with other weights"
        )
        found = picture_of(find_checkpoints(folder / "checkpoints").checkpoints[-1].path)
        assert (found.step, found.weights) == (STEPS, self._final)
        # A run that goes on from its end has nothing to do but to save once more, with loops that say so.
        assert found == self._expected[STEPS] or str(STEPS) not in digests

    def _start(
        self, folder: Path, asynchronous: bool, path: Path | None = None, keep: int = 2
    ) -> list[int]:
        """Fork the ranks of a training, which keeps its checkpoints in a part of the folder."""
        self._worlds += 1
        self._board.clear()
        checkpoints = folder / "checkpoints"
        for name, text in FOREIGN.items():
            (checkpoints / name).parent.mkdir(parents=True, exist_ok=True)
            (checkpoints / name).write_text(text)
        store = self._root / f"store-{self._worlds}"
        return [
            fork_rank(
                rank,
                self._ranks,
                store,
                folder / f"log-{rank}",
                partial(
                    _train,
                    self._board,
                    rank,
                    folder,
                    self._sharding,
                    asynchronous,
                    None if path is None else str(path),
                    keep,
                ),
            )
            for rank in range(self._ranks)
        ]

    def _reap(self, children: Sequence[int], patience_s: float) -> tuple[list[int], int]:
        """Wait for all of them.

        Returns:
            Exit codes, and how many had to be killed.
        """
        deadline = time.monotonic() + patience_s
        left, codes, hung = set(children), dict.fromkeys(children, 0), 0
        while left:
            for child in list(left):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    left.remove(child)
            if left and time.monotonic() > deadline:
                hung = len(left)
                for child in left:
                    os.kill(child, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.002)
        return [codes[child] for child in children], hung


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _train(
    board: Board,
    rank: int,
    folder: Path,
    sharding: str,
    asynchronous: bool,
    path: str | None,
    keep: int,
) -> None:
    propagation.LOOKUP_S = 0.05  # survivors need not wait long for a reason that nobody gives
    reporter = Reporter(board, rank, folder / f"notes-{rank}")
    reporter.install()
    digests = train(folder / "checkpoints", sharding, asynchronous, path, keep, reporter.started)
    (folder / f"digests-{rank}").write_text(
        "".join(f"{step} {text}\n" for step, text in digests.items())
    )


# -- from a test


class KillServer:
    """A process that runs trials; use as a context manager.

    Args:
        sharding: The strategy of the trainings.
    """

    def __init__(self, sharding: str = "full_shard") -> None:
        self._sharding = sharding
        self._context = multiprocessing.get_context(
            "forkserver"
        )  # the same server as that of the pool of ranks
        self._context.set_forkserver_preload(
            ["torch.distributed", "torch.testing", "lightning.pytorch", "pytest"]
        )
        self._folder = Path(tempfile.mkdtemp(prefix="kills-"))

    def __enter__(self) -> KillServer:
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=serve, args=(theirs, str(self._folder), self._sharding), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive(100.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.kill()  # its ranks die with it
        self._process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, trials: Sequence[Trial]) -> Iterator[Outcome]:
        """Run trials one after the other."""
        for trial in trials:
            self._connection.send(trial)
            yield self._receive(5 * PATIENCE_S)

    def _receive(self, timeout_s: float) -> Outcome:
        assert self._connection.poll(timeout_s), "the server of trials does not answer"
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def serve(connection: Connection, folder: str, sharding: str) -> None:
    """What the server does: learn, then answer with outcomes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            runner = Runner(Path(folder), sharding)
            runner.learn()
            connection.send(None)
            while True:
                connection.send(runner.run(connection.recv()))
        except (EOFError, ConnectionError):
            raise
        except Exception:  # noqa: BLE001 - told to the test
            connection.send(traceback.format_exc())
