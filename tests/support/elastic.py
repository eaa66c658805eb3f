"""Two torchrun agents on this machine that stand for two nodes, and the job that they run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.ports import free_port
from support.said import TRAINING, Said
from support.sockets import listening

TESTS = Path(__file__).resolve().parents[1]
RESTARTS = 3


@dataclass(kw_only=True)
class ElasticJob:
    """Agents and what their ranks say."""

    out: Path
    nodes: str
    arguments: tuple[str, ...]
    ranks_per_node: int
    endpoint: str
    environment: dict[str, str]
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    @property
    def said(self) -> Said:
        """What ranks have said so far, in all attempts."""
        return Said(self.out)

    def start_agent(self) -> None:
        """Start one more node, as the documentation says."""
        number = len(self.agents)
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.nodes}",
        ]
        command += [
            f"--nproc-per-node={self.ranks_per_node}",
            f"--max-restarts={RESTARTS}",
            "--rdzv-id=job",
        ]
        command += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            "--local-addr=127.0.0.1",
        ]
        command += [
            "--rdzv-conf=last_call_timeout=8",
            str(TRAINING),
            str(self.out),
            *self.arguments,
        ]
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCH", "SLURM", "MASTER"))
        }
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **self.environment}
        with (self.out / f"agent-{number}.log").open("wb") as log:
            self.agents.append(
                subprocess.Popen(
                    command,
                    env=kept | own,
                    start_new_session=True,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def text(self) -> str:
        """What agents and ranks have printed."""
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.out.glob("agent-*.log"))
        )

    def until_step(self, step: int, ranks: int, timeout_s: float = 90.0) -> None:
        """Wait until so many ranks have come to a step."""
        deadline = time.monotonic() + timeout_s
        while not self.said.all_at(step, ranks):
            if time.monotonic() > deadline or all(
                agent.poll() is not None for agent in self.agents
            ):
                raise RuntimeError(f"the job never came to step {step}:\n{self.text()}")
            time.sleep(0.05)

    def lose_a_node(self) -> int:
        """Kill an agent and its ranks, a machine that is gone, but not the one that hosts the rendezvous; the other."""
        port = int(self.endpoint.rpartition(":")[2])
        hosts = [port in {found for _, found in listening(agent.pid)} for agent in self.agents]
        lost = self.agents[hosts.index(False)]
        for pid in (lost.pid, *_children(lost.pid)):
            os.kill(pid, signal.SIGKILL)
        lost.wait()
        return hosts.index(True)

    def wait(self, timeout_s: float = 150.0) -> list[int]:
        """The exit codes of the agents; a hang raises."""
        deadline = time.monotonic() + timeout_s
        try:
            return [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"the job has not ended after {timeout_s:g} s:\n{self.text()}"
            ) from error


@contextmanager
def elastic(
    out: Path, *arguments: str, nodes: str = "2", ranks_per_node: int = 1, **environment: str
) -> Iterator[ElasticJob]:
    """Start the training script on some nodes; nothing is left of it.

    Args:
        out: Where it writes.
        arguments: Of the script.
        nodes: As torchrun takes them, ``MIN:MAX`` for a job that goes on with fewer.
        ranks_per_node: Ranks of each agent.
        environment: More of it.
    """
    out.mkdir(parents=True, exist_ok=True)
    job = ElasticJob(
        out=out,
        nodes=nodes,
        arguments=arguments,
        ranks_per_node=ranks_per_node,
        endpoint=f"127.0.0.1:{free_port()}",
        environment=environment,
    )
    try:
        for _ in range(2):
            job.start_agent()
        yield job
    finally:
        leaders = [agent.pid for agent in job.agents]
        ranks = {line["pid"] for lines in job.said.lines.values() for line in lines}
        for pid in ranks & {int(name) for name in os.listdir("/proc") if name.isdigit()}:
            # torchrun gives each rank a session of its own.
            if TRAINING.name in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        for agent, pid in zip(job.agents, leaders, strict=True):
            for child in _children(pid):
                os.kill(child, signal.SIGKILL)
            if agent.poll() is None:
                agent.kill()
            agent.wait()


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []
