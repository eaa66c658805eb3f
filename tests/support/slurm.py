"""A real SLURM cluster of two nodes on this machine, and jobs on it; see ``tests/cluster/slurm-cluster``."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.said import TRAINING, Said

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS / "cluster" / "slurm-cluster"
EXAMPLE = TESTS.parent / "examples" / "slurm" / "many-nodes.sbatch"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
# What the example asks for and this machine has not got.
OVERRIDES = ("--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--mem=100")


def missing() -> list[str]:
    """Programs of SLURM that are not installed; they are no programs of ordinary users, so not always on PATH."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in NEEDED if shutil.which(name, path=path) is None]


@dataclass(kw_only=True)
class Cluster:
    """A cluster that runs."""

    environment: dict[str, str]
    jobs: list[str] = field(default_factory=list[str])

    def call(self, *command: str, timeout_s: float = 60.0) -> str:
        """What a command of SLURM, or of the script, prints."""
        done = subprocess.run(
            command, env=self.environment, text=True, capture_output=True, timeout=timeout_s
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout.strip()

    def submit(
        self, out: Path, *arguments: str, srun: tuple[str, ...] = (), options: tuple[str, ...] = ()
    ) -> "Job":
        """Start the training script by the example of the documentation.

        Args:
            out: Where it writes.
            arguments: Of the script.
            srun: Settings of srun, as environment variables (``NAME=value``).
            options: Of sbatch, over those of the example.
        """
        out.mkdir(parents=True, exist_ok=True)
        log = out / "job.log"
        exported = ",".join(["--export=ALL", *srun])
        command = [
            "sbatch",
            "--parsable",
            exported,
            f"--output={log}",
            *OVERRIDES,
            *options,
            str(EXAMPLE),
        ]
        number = self.call(*command, str(TRAINING), str(out), *arguments)
        if not number.isdigit():
            raise RuntimeError(f"sbatch did not take the job: {number}")
        self.jobs.append(number)
        return Job(cluster=self, number=number, out=out, log=log)


@dataclass(kw_only=True)
class Job:
    """One job."""

    cluster: Cluster
    number: str
    out: Path
    log: Path

    @property
    def said(self) -> Said:
        """What its ranks have said so far."""
        return Said(self.out)

    def text(self) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def until_step(self, step: int, timeout_s: float = 90.0) -> None:
        """Wait until all ranks have come to a step."""
        deadline = time.monotonic() + timeout_s
        while not self.said.all_at(step, ranks=4):
            if time.monotonic() > deadline:
                raise RuntimeError(f"job {self.number} never came to step {step}:\n{self.text()}")
            time.sleep(0.05)

    def wait(self, timeout_s: float = 120.0) -> str:
        """How it has ended for good: ``STATE exit=CODE:SIGNAL restarts=N``."""
        return self.cluster.call(
            str(SCRIPT), "wait", self.number, str(int(timeout_s)), timeout_s=timeout_s + 30
        )


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a cluster of two nodes with two CPUs each; nothing is left of it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # not pytest's: paths of sockets are short
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH", "SRUN"))
    }
    environment |= {
        "SLURM_CLUSTER_DIR": str(folder / "c"),
        "SLURM_CLUSTER_KILL_WAIT": "3",
        "OMP_NUM_THREADS": "1",
    }
    # The jobs' python is this one, wherever SLURM looks for programs.
    path = [str(Path(sys.executable).parent), environment.get("PATH", ""), "/usr/sbin", "/sbin"]
    environment["PATH"] = os.pathsep.join(path)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(TESTS), environment.get("PYTHONPATH")])
    )
    running = Cluster(environment=environment)
    try:
        for line in running.call(str(SCRIPT), "up", "-c", "4").splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            environment[name] = value
        if "SLURM_CONF" not in environment:
            raise RuntimeError("the cluster did not start")
        yield running
    finally:
        subprocess.run([str(SCRIPT), "down"], env=environment, capture_output=True, timeout=120)
        shutil.rmtree(folder, ignore_errors=True)
