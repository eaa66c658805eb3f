"""The command line: verify, inspect, consolidate and index checkpoints, without GPU or process group."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from shardeddp.checkpoint.export import Selection, to_ckpt, to_safetensors
from shardeddp.checkpoint.find import read_manifest
from shardeddp.checkpoint.interop import write_metadata
from shardeddp.checkpoint.manifest import DCP_METADATA, MANIFEST
from shardeddp.checkpoint.verify import (
    Verification,
    as_json,
    checkpoints_in,
    examine,
    module_rows,
    tensor_rows,
)
from shardeddp.errors import CheckpointError, printable
from shardeddp.report import human_bytes, inspection_view, terminal_width, verification_view

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?)B?", flags=re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_EPILOG = "Exit status: 0 all is well, 1 a checkpoint is damaged or something failed, 2 the command line is wrong."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Of the command line; None: this process's.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except _UsageError as error:
        print(f"shardeddp {options.name}: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, NotImplementedError) as error:
        print(f"shardeddp {options.name}: {error}", file=sys.stderr)
    except BrokenPipeError:
        # The reader of the output has closed it. A flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(
            f"shardeddp {options.name}: {error.filename or ''}: {error.strerror or error}",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print(f"shardeddp {options.name}: interrupted", file=sys.stderr)
        return 130
    return 1


def verify(options: argparse.Namespace) -> int:
    """Check every byte of checkpoints."""
    results: list[tuple[Verification, float]] = []
    for given in options.directories:
        one = not given.is_dir() or any(
            os.path.lexists(given / name) for name in (MANIFEST, DCP_METADATA)
        )
        paths = [given] if one else checkpoints_in(given)
        if not paths:
            raise CheckpointError(f"{given} is no checkpoint, and there is none in it")
        found: list[Verification] = []
        for path in paths:
            start = time.perf_counter()
            with _progress(f"verifying {path.name}", options.json) as (started, advanced):
                found.append(examine(path, advanced, started))
            results.append((found[-1], time.perf_counter() - start))
            if not options.json:
                print("\n".join(verification_view(*results[-1])))
        if not one and not options.json:
            newest = next((each.path for each in found if each.good), None)
            print(printable(f"newest good checkpoint in {given}: {newest or 'none'}"))
    if options.json:
        print(json.dumps([_verification_json(*result) for result in results], indent=2))
    return 0 if all(found.good for found, _ in results) else 1


def inspect(options: argparse.Namespace) -> int:
    """Show the contents of a checkpoint."""
    path = _require_checkpoint(options.directory, foreign=False)
    manifest = read_manifest(path)
    every = options.all or options.tensors is not None
    rows = (
        tensor_rows(manifest, options.tensors or "*")
        if every or options.json
        else module_rows(manifest)
    )
    if options.tensors is not None and not rows:
        raise CheckpointError(
            f"{path}: no tensor has a name like {options.tensors!r}; --all lists them"
        )
    if options.json:
        print(json.dumps(as_json(path, manifest, rows), indent=2))
    else:
        shown = inspection_view(path, manifest, rows, terminal_width(), folded=not every)
        print("\n".join(shown))
    return 0


def consolidate(options: argparse.Namespace) -> int:
    """Make one file, or few, of a checkpoint directory."""
    if options.output.suffix == ".ckpt":
        _check_ckpt_options(options)
    path = _require_checkpoint(options.directory, options.foreign)
    selection = Selection(
        foreign=options.foreign,
        trust_pickle=options.trust_pickle,
        ema=options.ema,
        strip_prefix=options.strip_prefix,
        dtype=DTYPES[options.dtype] if options.dtype else None,
        weights_only=options.weights_only,
    )
    with _progress(f"writing {options.output.name}") as (started, advanced):
        reports: dict[str, Any] = {"force": options.force, "started": started, "progress": advanced}
        if options.output.suffix == ".ckpt":
            exported = to_ckpt(path, options.output, selection, **reports)
        else:
            limit = options.max_shard_size
            exported = to_safetensors(path, options.output, selection, max_nbytes=limit, **reports)
    for note in exported.notes:
        print(f"shardeddp {options.name}: {printable(note)}", file=sys.stderr)
    what = f"{exported.num_tensors:,} tensors, {human_bytes(exported.nbytes)}"
    shown = [str(path) for path in exported.paths]
    files = shown[0] if len(shown) == 1 else f"{shown[0]} and {len(shown) - 1} more"
    print(printable(f"wrote {what} to {files}"))
    return 0


def metadata(options: argparse.Namespace) -> int:
    """Write the index of torch.distributed.checkpoint into a checkpoint saved without."""
    path = _require_checkpoint(options.directory, foreign=False)
    if path.is_file():
        raise CheckpointError(f"{path} is one plain file, expected a directory")
    count = write_metadata(path, options.force)
    print(printable(f"wrote {path / DCP_METADATA} for {count:,} pieces"))
    return 0


class _UsageError(Exception):
    """The options of the command line contradict each other."""


def _check_ckpt_options(options: argparse.Namespace) -> None:
    if options.dtype:
        raise _UsageError(
            "a .ckpt file keeps the dtypes of the training: --dtype is for safetensors files"
        )
    if not options.weights_only and (options.ema or options.strip_prefix):
        raise _UsageError(
            "a whole .ckpt file is as the training saved it: --ema and --strip-prefix go with "
            "--weights-only"
        )


def _require_checkpoint(path: Path, foreign: bool) -> Path:
    """The path, if it may be a checkpoint of the wanted kind; its reader checks the rest."""
    if path.is_file() and not foreign:
        return path
    if not path.is_dir():
        what = "is no directory" if os.path.lexists(path) else "does not exist"
        raise CheckpointError(f"{path} {what}: expected the directory of a sharded checkpoint")
    own, theirs = (os.path.lexists(path / name) for name in (MANIFEST, DCP_METADATA))
    if not own and not theirs:
        inside = checkpoints_in(path)
        hint = f"; {inside[0]} is one" if inside else ""
        raise CheckpointError(
            f"{path} is no sharded checkpoint: there is no {MANIFEST} in it{hint}"
        )
    if not own and not foreign:
        raise CheckpointError(
            f"{path} is not a checkpoint of shardeddp: there is no {MANIFEST} in it. Another tool "
            f"wrote it, or its manifest was lost: `shardeddp verify` checks it, `shardeddp "
            f"consolidate --foreign` reads it"
        )
    return path


@contextmanager
def _progress(
    title: str, quiet: bool = False
) -> Generator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar, if somebody sees it.

    Yields:
        Function called with the total number of bytes, and with each number that is done.
    """
    hidden = quiet or not sys.stderr.isatty()
    with tqdm(
        desc=title, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=hidden
    ) as bar:

        def started(nbytes: int) -> None:
            bar.total = nbytes

        def advanced(nbytes: int) -> None:
            bar.update(nbytes)

        yield started, advanced


def _verification_json(found: Verification, seconds: float) -> dict[str, Any]:
    damages = [
        {
            "file": damage.file,
            "tensor": damage.tensor or None,
            "bytes": [damage.where.start, damage.where.stop] if damage.where else None,
            "expected": damage.expected,
            "found": damage.found,
        }
        for damage in found.damages
    ]
    figures = {
        "path": str(found.path),
        "good": found.good,
        "step": found.step,
        "nbytes": found.nbytes,
    }
    return {
        **figures,
        "seconds": round(seconds, 3),
        "damages": damages,
        "unchecked": found.unchecked,
    }


# -- Command line


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=28)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardeddp",
        description="Tools for checkpoints. They need no GPU and no process group.",
        epilog=_EPILOG,
        formatter_class=_formatter,
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    _add_verify(commands)
    _add_inspect(commands)
    _add_consolidate(commands)
    _add_metadata(commands)
    return parser


def _add_command(
    commands: Any, function: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        function.__name__,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EPILOG,
        formatter_class=_formatter,
    )
    parser.set_defaults(command=function)
    return parser


def _add_verify(commands: Any) -> None:
    parser = _add_command(commands, verify, "compare every byte of checkpoints with its checksum")
    where = (
        "a checkpoint: a directory of shardeddp or torch.distributed.checkpoint, a plain file, or a "
        "directory of those"
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help=where)
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")


def _add_inspect(commands: Any) -> None:
    parser = _add_command(
        commands, inspect, "show what is in a checkpoint, without reading its tensors"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--tensors",
        metavar="PATTERN",
        help="tensors whose names match: 'model.blocks.0.*', or a part",
    )
    which.add_argument("--all", action="store_true", help="every tensor, not one row per module")
    parser.add_argument("--json", action="store_true", help="print it as JSON, with every tensor")


def _add_consolidate(commands: Any) -> None:
    parser = _add_command(
        commands, consolidate, "make a safetensors or a .ckpt file of a checkpoint"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
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
        "--dtype", choices=DTYPES, help="safetensors: of all floating-point tensors"
    )
    limit = "safetensors: begin another file above this (default 5GB)"
    parser.add_argument("--max-shard-size", default="5GB", type=_nbytes, metavar="SIZE", help=limit)
    parser.add_argument(
        "--foreign", action="store_true", help="the directory is one of FSDP, FSDP2 or plain DCP"
    )
    parser.add_argument("--force", action="store_true", help="replace what is there")
    danger = "unpickle anything: that runs the code of whoever wrote it"
    parser.add_argument("--trust-pickle", action="store_true", help=danger)


def _add_metadata(commands: Any) -> None:
    text = "let torch.distributed.checkpoint read a checkpoint of so many pieces that it was saved without .metadata"
    parser = _add_command(commands, metadata, text)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
    parser.add_argument("--force", action="store_true", help="replace one that was made before")


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
