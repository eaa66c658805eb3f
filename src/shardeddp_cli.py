"""The command line's parser; a command's code is imported when it is run.

It is a module outside the package, because an import of the package imports torch, which takes
seconds and is not needed for ``--help``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?)B?", flags=re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_EPILOG = (
    "Exit status: 0 all is well, 1 a checkpoint is damaged or differs, something is lost or failed, "
    "2 the command line is wrong."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    options = _parser().parse_args(arguments)
    return import_module("shardeddp.cli").run(options)


def _version() -> str:
    try:
        return version("shardeddp")
    except PackageNotFoundError:
        return "that is not installed"


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=28)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardeddp",
        description="Tools for checkpoints and for files of other strategies, without GPU or process group.",
        epilog=_EPILOG,
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action="version", version=f"shardeddp {_version()}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    _add_verify(commands)
    _add_inspect(commands)
    _add_consolidate(commands)
    _add_diff(commands)
    _add_metadata(commands)
    _add_migrate(commands)
    _add_plan(commands)
    _add_probe(commands)
    _add_report(commands)
    return parser


def _add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EPILOG,
        formatter_class=_formatter,
    )
    return parser


def _add_verify(commands: Any) -> None:
    parser = _add_command(
        commands, "verify", "compare checkpoints with the checksums of their values"
    )
    where = (
        "a checkpoint: a directory of shardeddp or torch.distributed.checkpoint, a plain file, or a "
        "directory of those"
    )
    parser.add_argument("directories", nargs="+", type=_checkpoint, metavar="DIR", help=where)
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")


def _add_inspect(commands: Any) -> None:
    parser = _add_command(
        commands, "inspect", "show what is in a checkpoint, without reading its tensors"
    )
    parser.add_argument("directory", type=_checkpoint, metavar="DIR", help="the checkpoint")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--tensors",
        metavar="PATTERN",
        help="tensors whose names match: 'model.blocks.0.*', or a part",
    )
    state = "what else it holds: hyper-parameters, callbacks with their metrics, loops, schedulers"
    which.add_argument("--state", action="store_true", help=state)
    which.add_argument("--all", action="store_true", help="every tensor, not one row per module")
    parser.add_argument("--json", action="store_true", help="print it as JSON, with every tensor")
    danger = "unpickle anything: that runs the code of whoever wrote it"
    parser.add_argument("--trust-pickle", action="store_true", help=danger)


def _add_consolidate(commands: Any) -> None:
    parser = _add_command(
        commands, "consolidate", "make a safetensors or a .ckpt file of a checkpoint"
    )
    parser.add_argument("directory", type=_checkpoint, metavar="DIR", help="the checkpoint")
    kinds = "NAME.safetensors: the weights; NAME.ckpt: all, as Lightning writes it without sharding"
    parser.add_argument("-o", "--output", required=True, type=_output, metavar="FILE", help=kinds)
    parser.add_argument(
        "--weights-only", action="store_true", help=".ckpt: no optimizers, schedulers, callbacks"
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="the averaged weights that Lightning's WeightAveraging saved",
    )
    parser.add_argument(
        "--strip-prefix", default="", metavar="PREFIX", help="drop this from names: 'net.'"
    )
    parser.add_argument(
        "--adapter",
        default="",
        metavar="NAME",
        help="safetensors: peft's adapter of this name alone ('default'), named as peft names it",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="safetensors: of all floating-point tensors",
    )
    limit = "safetensors: begin another file above this (default 5GB)"
    parser.add_argument("--max-shard-size", type=_nbytes, metavar="SIZE", help=limit)
    parser.add_argument(
        "--foreign", action="store_true", help="the directory is one of FSDP, FSDP2 or plain DCP"
    )
    force = "replace what is there, and write values that --dtype makes infinite"
    parser.add_argument("--force", action="store_true", help=force)
    danger = "unpickle anything: that runs the code of whoever wrote it"
    parser.add_argument("--trust-pickle", action="store_true", help=danger)


def _add_metadata(commands: Any) -> None:
    text = "let torch.distributed.checkpoint read a checkpoint of so many pieces that it was saved without .metadata"
    parser = _add_command(commands, "metadata", text)
    parser.add_argument("directory", type=_checkpoint, metavar="DIR", help="the checkpoint")
    parser.add_argument("--force", action="store_true", help="replace one that was made before")


def _add_diff(commands: Any) -> None:
    parser = _add_command(
        commands, "diff", "compare two checkpoints: names, shapes, dtypes and values of all tensors"
    )
    for name in ("first", "second"):
        where = "a checkpoint: a directory of shardeddp, or a plain file"
        parser.add_argument(name, type=_checkpoint, metavar=name.upper(), help=where)
    parser.add_argument(
        "--weights-only", action="store_true", help="the model's tensors, nothing of optimizers"
    )
    parser.add_argument("--all", action="store_true", help="every difference, not the first 20")
    danger = "unpickle anything: that runs the code of whoever wrote it"
    parser.add_argument("--trust-pickle", action="store_true", help=danger)


def _add_migrate(commands: Any) -> None:
    text = "say what takes the place of another strategy in a file, and what changes or is lost"
    parser = _add_command(commands, "migrate", text)
    kinds = "Python or YAML for Lightning, YAML of Accelerate, or JSON of DeepSpeed; nothing is run"
    parser.add_argument("file", type=Path, metavar="FILE", help=kinds)


_STRATEGIES = ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
_PRECISIONS = ("32-true", "bf16-mixed", "bf16", "bf16-true", "16-mixed", "fp16", "16-true")


def _add_plan(commands: Any) -> None:
    text = "say what fits on some machines and how fast it is, before anything runs"
    parser = _add_command(commands, "plan", text)
    model = "import path of a LightningModule, or a YAML file of LightningCLI with its `model`"
    parser.add_argument("module", nargs="?", metavar="MODULE", help=model)
    parser.add_argument("--args", metavar="JSON", help="of its constructor")
    shape = "of a batch: int64:B,S; several are a tuple (default: its example_input_array)"
    parser.add_argument("--input", action="append", default=[], metavar="DTYPE:SIZES", help=shape)
    parser.add_argument(
        "--transformer", type=Path, metavar="CONFIG", help="instead: a config.json of transformers"
    )
    sizes = "instead: layers=32,width=4096,heads=32,vocabulary=32000,kv_heads=8,hidden=11008,..."
    parser.add_argument("--dims", metavar="SIZES", help=sizes)
    parser.add_argument("--length", type=_count, default=2048, help="tokens of a sample (2048)")
    device = "H100, A100-40, B200, ... (that of --calibrate, else H100); one that is not known needs the next four"
    parser.add_argument("--gpu", metavar="NAME", help=device)
    parser.add_argument("--gpus", type=_count, required=True, metavar="N", help="of all nodes")
    parser.add_argument(
        "--per-node", type=_count, default=8, metavar="N", help="GPUs of a node (8)"
    )
    parser.add_argument(
        "--network", type=float, metavar="GBITS", help="Gbit/s between nodes for each GPU"
    )
    for name, unit in (
        ("bf16-tflops", "dense TFLOP/s"),
        ("memory-gb", "GB"),
        ("memory-tbs", "TB/s of memory"),
        ("link-gbs", "GB/s inside a node, one direction"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar="N", help=f"of the GPU: {unit}")
    parser.add_argument(
        "--global-batch", type=_count, metavar="N", help="samples of an optimizer step, all ranks"
    )
    each = "one of those to compare; may be repeated"
    parser.add_argument(
        "--strategy",
        action="append",
        choices=_STRATEGIES,
        help=each,
    )
    parser.add_argument(
        "--precision",
        action="append",
        choices=_PRECISIONS,
        help=each,
    )
    parser.add_argument(
        "--recompute", action="append", choices=("none", "selective", "full"), help=each
    )
    parser.add_argument(
        "--offload", action="append", choices=("none", "optimizer", "params"), help=each
    )
    parser.add_argument("--micro-batch", action="append", type=_count, metavar="N", help=each)
    parser.add_argument(
        "--tensor-parallel",
        action="extend",
        nargs="+",
        type=_count,
        metavar="T",
        help="ranks that split layers, to compare (1)",
    )
    split = "which layers: auto, or a YAML or JSON file of names and styles (auto: --dims, --transformer)"
    parser.add_argument("--tensor-parallel-plan", metavar="FILE", help=split)
    parser.add_argument(
        "--expert-parallel",
        action="extend",
        nargs="+",
        type=_count,
        metavar="E",
        help="ranks that have different experts, to compare (1)",
    )
    own = "which modules have experts: a class, or a pattern of names (those of transformers are found)"
    parser.add_argument("--experts", action="append", metavar="PATTERN", help=own)
    states = "optimizer states of each trained parameter (2: AdamW; 1: SGD with momentum)"
    parser.add_argument("--optimizer-states", type=int, default=2, metavar="N", help=states)
    _add_calibrate(parser)
    parser.add_argument("--auto-wrap-policy", default="auto", metavar="POLICY", help="units (auto)")
    parser.add_argument("--top", type=_count, default=10, metavar="N", help="rows to show (10)")
    parser.add_argument("--why", action="store_true", help="why the best is the best")
    parser.add_argument(
        "--json", action="store_true", help="print every plan as JSON, with --why its lines"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="a picture of the best")


def _add_probe(commands: Any) -> None:
    text = "measure how fast this machine computes and communicates, for `plan --calibrate`"
    parser = _add_command(commands, "probe", text)
    parser.description = (
        "Measure in less than a minute how fast this machine computes, moves memory and, started by "
        "`torchrun --nproc-per-node N -m shardeddp probe`, how fast its ranks communicate."
    )
    where = "what to write (probe.json)"
    parser.add_argument(
        "-o", "--output", default="probe.json", type=Path, metavar="FILE", help=where
    )


def _add_report(commands: Any) -> None:
    text = "draw where the time of a run's steps went, beside the plan, as one HTML page"
    parser = _add_command(commands, "report", text)
    run = "what StepMonitor(record=FILE) has written"
    parser.add_argument("file", type=Path, metavar="FILE", help=run)
    where = "what to write (FILE with .html in the place of .json)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=where)
    _add_calibrate(parser)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    measured = "what `shardeddp probe` or StepMonitor(record=FILE) has written; may be repeated"
    parser.add_argument(
        "--calibrate", action="append", default=[], type=Path, metavar="FILE", help=measured
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return int(text)


def _checkpoint(text: str) -> Path | str:
    """Parse a path, or the URL of an object store, which ``Path`` would strip of a slash."""
    return text if "://" in text else Path(text)


def _output(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".safetensors", ".ckpt"):
        raise argparse.ArgumentTypeError(
            f"expected a name that ends in .safetensors or .ckpt, found {text!r}"
        )
    return path


def _nbytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"expected a size like 5GB, 500MB or 2GiB, found {text!r}")
    unit = found[2].upper()
    return max(
        1,
        int(
            float(found[1])
            * (1024 if unit.endswith("I") else 1000) ** _POWERS[unit.removesuffix("I")]
        ),
    )
