"""Commands: probe machines, plan runs, verify, inspect, compare, consolidate and index checkpoints, migrate files."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from tqdm import tqdm

from shardeddp.checkpoint.contents import Contents
from shardeddp.checkpoint.durable import try_writing
from shardeddp.checkpoint.export import (
    MAX_FILE_NBYTES,
    Selection,
    open_contents,
    to_ckpt,
    to_safetensors,
)
from shardeddp.checkpoint.find import (
    checkpoints_in,
    read_manifest,
    what_lies_beside,
)
from shardeddp.checkpoint.full_read import carries_index
from shardeddp.checkpoint.import_foreign import FOREIGN
from shardeddp.checkpoint.interop import write_metadata
from shardeddp.checkpoint.location import Location, location
from shardeddp.checkpoint.manifest import DCP_METADATA, MANIFEST
from shardeddp.checkpoint.read import LazyTensor, Progress
from shardeddp.checkpoint.schema import KEY, OPTIMIZERS, WEIGHTS
from shardeddp.checkpoint.state_codec import tensors_with_paths
from shardeddp.checkpoint.verify import (
    Row,
    Verification,
    as_json,
    examine,
    is_like,
    module_rows,
    tensor_rows,
)
from shardeddp.errors import CheckpointError, ConfigurationError, UsageError, printable
from shardeddp.lightning.probe import probe as measure
from shardeddp.migrate import migrate as read_file
from shardeddp.migrate import report as migration_report
from shardeddp.planner.calibration import Recorded, calibrate, read, write
from shardeddp.planner.plan import make_plan
from shardeddp.planner.source import Source, of_dimensions, of_module, of_transformers_config
from shardeddp.planner.transformer import Dimensions
from shardeddp.planner.view import run_page
from shardeddp.report import (
    human_bytes,
    inspection_view,
    tensor_table,
    terminal_width,
    verification_view,
)
from shardeddp.wrap.tensor_plan import TensorPlan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(options: argparse.Namespace) -> int:
    """Run one command, and return its exit status."""
    try:
        return _COMMANDS[options.name](options)
    except UsageError as error:
        print(f"shardeddp {options.name}: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, ConfigurationError, NotImplementedError) as error:
        print(f"shardeddp {options.name}: {error}", file=sys.stderr)
    except BrokenPipeError:
        # The reader has closed the pipe. A flush at exit would fail again.
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
    """Verify every byte of checkpoints."""
    results: list[tuple[Verification, float]] = []
    for given in map(location, options.directories):
        _refuse_safetensors(given)
        one = not given.is_dir() or any(
            (given / name).is_taken() for name in (MANIFEST, DCP_METADATA)
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
    path = _require_checkpoint(location(options.directory), foreign=False)
    if options.state and options.json:
        raise UsageError("--state prints lines: leave --json out, which describes the tensors")
    if options.state:
        print("\n".join(_state(_contents(path, options).checkpoint)))
        return 0
    if path.is_file() and not carries_index(path):
        return _inspect_file(path, options)
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


def _inspect_file(path: Location, options: argparse.Namespace) -> int:
    """Show the tensors of another tool's plain file; the file is memory-mapped, not read."""
    if options.json:
        raise UsageError(f"--json describes checkpoints of shardeddp, and {path} is none")
    named = _named_tensors(_contents(path, options)).items()
    rows = [
        Row(
            name=name,
            num_tensors=1,
            shape=tuple(tensor.shape),
            dtypes=(str(tensor.dtype).removeprefix("torch."),),
            numel=tensor.numel(),
            nbytes=tensor.nbytes,
            num_parts=1,
        )
        for name, tensor in named
        if is_like(options.tensors or "*", name)
    ]
    if not rows:
        raise CheckpointError(f"{path}: no tensor has a name like {options.tensors or '*'!r}")
    print(printable(f"checkpoint  {path}, a plain file of another strategy or tool"))
    print("\n".join(["", *tensor_table(rows, terminal_width())]))
    return 0


def _state(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a line per value of a checkpoint's state, without weights and optimizer states."""
    if not path:
        value = {key: it for key, it in value.items() if key not in (WEIGHTS, OPTIMIZERS, KEY)}
    if isinstance(value, (Mapping, list, tuple)) and value:
        content = value if isinstance(value, Mapping) else enumerate(cast("list[Any]", value))
        items = dict(content).items()
        keys = {key: str(key) for key, _ in items}
        if path == ("callbacks",):  # keys are name and options: drop the options of unique names
            short = {key: name.partition("{")[0] for key, name in keys.items()}
            keys |= {key: it for key, it in short.items() if [*short.values()].count(it) == 1}
        for key, item in items:
            yield from _state(item, (*path, keys[key]))
    elif isinstance(value, torch.Tensor) and value.numel() != 1:
        yield printable(f"{'.'.join(path)}: tensor of shape {tuple(value.shape)}, {value.dtype}")
    else:
        whole = value.whole() if isinstance(value, LazyTensor) else value
        shown = whole.item() if isinstance(whole, torch.Tensor) else whole
        yield printable(f"{'.'.join(path)}: {shown!r}")


def consolidate(options: argparse.Namespace) -> int:
    """Export a checkpoint directory to one file or a few."""
    if options.output.suffix == ".ckpt":
        _check_ckpt_options(options)
    _refuse_onto("-o", options.output, options.directory)
    path = _require_checkpoint(location(options.directory), options.foreign)
    selection = Selection(
        foreign=options.foreign,
        trust_pickle=options.trust_pickle,
        ema=options.ema,
        strip_prefix=options.strip_prefix,
        adapter=options.adapter,
        dtype=DTYPES[options.dtype] if options.dtype else None,
        weights_only=options.weights_only,
    )
    with _progress(f"writing {options.output.name}") as (started, advanced):
        reports: dict[str, Any] = {"force": options.force, "started": started, "progress": advanced}
        if options.output.suffix == ".ckpt":
            exported = to_ckpt(path, options.output, selection, **reports)
        else:
            limit = options.max_shard_size or MAX_FILE_NBYTES
            exported = to_safetensors(path, options.output, selection, max_nbytes=limit, **reports)
    for note in exported.notes:
        print(f"shardeddp {options.name}: {printable(note)}", file=sys.stderr)
    what = f"{exported.num_tensors:,} tensors, {human_bytes(exported.nbytes)}"
    shown = [str(path) for path in exported.paths]
    files = shown[0] if len(shown) == 1 else f"{shown[0]} and {len(shown) - 1} more"
    print(printable(f"wrote {what} to {files}"))
    return 0


def metadata(options: argparse.Namespace) -> int:
    """Write the index of torch.distributed.checkpoint into a checkpoint saved without one."""
    found = _require_checkpoint(location(options.directory), foreign=False)
    path = found.local_only("the index is written into a directory of a file system")
    if path.is_file():
        raise CheckpointError(f"{path} is one plain file, expected a directory")
    count = write_metadata(path, options.force)
    print(printable(f"wrote {path / DCP_METADATA} for {count:,} pieces"))
    return 0


def _refuse_onto(option: str, output: Path, *read_from: object) -> None:
    """Refuse to write onto a file that the command reads, by any of its names."""
    for it in read_from:
        path = Path(str(it))
        if path.exists() and os.path.realpath(path) == os.path.realpath(output):
            raise UsageError(
                f"{option} {output}: expected another file than {it}, which is read and would be "
                f"overwritten"
            )


def _require_writable(option: str, output: Path) -> None:
    """Refuse a file that cannot be written, before its content takes time."""
    with suppress(OSError):
        if output.parent.is_dir():
            try_writing(output)
            return
    raise UsageError(
        f"{option} {output}: expected a file in an existing directory, which can be written"
    )


def plan(options: argparse.Namespace) -> int:
    """Print settings that fit on a cluster, their predicted step times, and the best as YAML."""
    if options.html is not None:
        files = (options.module, options.transformer, options.tensor_parallel_plan)
        _refuse_onto("--html", options.html, *filter(None, files), *options.calibrate)
        _require_writable("--html", options.html)
    compared = {
        "strategies": options.strategy,
        "recomputes": options.recompute,
        "offloads": options.offload,
        "micro_batches": options.micro_batch,
    }
    with redirect_stdout(sys.stderr):  # models may print
        made = make_plan(
            _source(options),
            gpu=options.gpu,
            gpus=options.gpus,
            per_node=options.per_node,
            network_gbits=options.network,
            gpu_figures={
                name: getattr(options, name)
                for name in ("bf16_tflops", "memory_gb", "memory_tbs", "link_gbs")
            },
            length=options.length,
            global_batch=options.global_batch,
            precisions=options.precision,
            auto_wrap_policy=options.auto_wrap_policy,
            tensor_parallel_sizes=options.tensor_parallel or (1,),
            tensor_parallel_plan=_tensor_plan(options.tensor_parallel_plan),
            expert_parallel_sizes=options.expert_parallel or (1,),
            experts=options.experts,
            optimizer_states=options.optimizer_states,
            calibrate=options.calibrate,
            **{name: given for name, given in compared.items() if given},
        )
    if options.json:
        print(made.as_json(why=options.why))
    else:
        lines = made.lines(options.top, terminal_width(80))
        lines += ["", *made.why()] if options.why else []
        lines += ["", made.yaml] if made.fits else []
        print("\n".join(lines))
    if options.html is not None:  # last: a file that cannot be written costs nobody the plan
        options.html.write_text(made.html(), encoding="utf-8", errors="backslashreplace")
    return 0 if made.fits else 1


def probe(options: argparse.Namespace) -> int:
    """Measure this machine's compute, memory and communication rates."""
    _require_writable("-o", options.output)
    found = measure()
    if found is not None:
        write(options.output, found)
        print(printable("\n".join([*calibrate([options.output]).lines, f"wrote {options.output}"])))
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the HTML page of a run that StepMonitor recorded."""
    output = options.output or options.file.with_suffix(".html")
    _refuse_onto("-o", output, options.file, *options.calibrate)
    run = read(options.file)
    if not isinstance(run, Recorded):
        raise ConfigurationError(
            f"{options.file}: expected what StepMonitor(record=...) has written, found a probe"
        )
    page = run_page(run, calibrate(options.calibrate, run.device.name))
    output.write_text(page, encoding="utf-8", errors="backslashreplace")
    print(printable(f"wrote {output}"))
    return 0


def _source(options: argparse.Namespace) -> Source:
    given = [options.module, options.dims, options.transformer]
    if sum(it is not None for it in given) != 1:
        raise UsageError("expected one of: a LightningModule, --transformer CONFIG, --dims SIZES")
    ignored = {"--input": options.input, "--args": options.args, "--experts": options.experts}
    for name, value in ignored.items():
        if value and options.module is None:
            raise UsageError(
                f"{name} is that of a LightningModule: expected its import path beside it, found "
                f"{'--dims' if options.transformer is None else '--transformer'}, whose decoder has its own"
            )
    if options.dims is not None:
        return of_dimensions(Dimensions.of_text(options.dims), options.length)
    if options.transformer is not None:
        return of_transformers_config(options.transformer, options.length)
    try:
        arguments = json.loads(options.args or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--args is no JSON object: {error}") from None
    if not isinstance(arguments, dict):
        raise UsageError(f"--args is no JSON object: found {options.args}")
    sys.path.insert(0, os.curdir)
    return of_module(str(options.module), arguments, options.input, options.length)


def _tensor_plan(given: str | None) -> TensorPlan | None:
    """Read a tensor-parallel plan from a YAML or JSON file; ``auto`` and None are returned."""
    if given is None or given == "auto":
        return given
    try:
        found = yaml.safe_load(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"--tensor-parallel-plan {given}: {why}") from error
    if isinstance(found, dict) and found.keys() == {"tensor_parallel_plan"}:
        return found["tensor_parallel_plan"]
    return found


_SHOWN = 20
"""Number of differences that ``diff`` lists without ``--all``."""


def diff(options: argparse.Namespace) -> int:
    """Compare the tensors of two checkpoints, one tensor at a time."""
    first, second = (
        _named_tensors(_contents(location(path), options))
        for path in (options.first, options.second)
    )
    found = [(name, f"only in {options.first}") for name in first if name not in second]
    found += [(name, f"only in {options.second}") for name in second if name not in first]
    largest = 0.0
    for name in first:
        if name in second:
            text, difference = _compare(first[name], second[name])
            largest = max(largest, difference)
            found += [(name, text)] if text else []
    shown = found if options.all else found[:_SHOWN]
    for name, text in shown:
        print(printable(f"{name}: {text}"))
    if len(shown) < len(found):
        print(f"... and {len(found) - len(shown):,} more (--all)")
    both = len(first.keys() & second.keys())
    if found:
        print(
            f"{len(found):,} differences; largest of values {largest:.6g}, in {both:,} tensors of both"
        )
    else:
        print(f"equal: {both:,} tensors")
    return 1 if found else 0


def _contents(path: Location, options: argparse.Namespace) -> Contents:
    keys = (WEIGHTS,) if vars(options).get("weights_only") else None
    selection = Selection(trust_pickle=options.trust_pickle)
    return open_contents(_require_checkpoint(path, foreign=False), selection, keys)


def _named_tensors(contents: Contents) -> dict[str, torch.Tensor]:
    found = tensors_with_paths(contents.checkpoint)
    return {".".join(map(str, keys)): tensor for tensor, keys in found}


def _compare(first: torch.Tensor, second: torch.Tensor) -> tuple[str, float]:
    """Describe the difference of two tensors, and its maximum; empty if they are equal."""
    if first.shape != second.shape:
        return f"shape {tuple(first.shape)} and {tuple(second.shape)}", 0.0
    dtypes = "" if first.dtype == second.dtype else f"{first.dtype} and {second.dtype}"
    whole = [it.whole() if isinstance(it, LazyTensor) else it for it in (first, second)]
    one, other = map(_dense, whole)
    unequal = ~_are_equal(one, other)
    if not bool(unequal.any()):
        return dtypes, 0.0
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one[unequal], other[unequal]
    difference = (one.to(wide) - other.to(wide)).abs()
    if not bool(difference.all()):  # different integers that float64 rounds to one number
        near = (one.to(torch.int64) - other.to(torch.int64)).abs().to(difference.dtype)
        difference = difference.where(difference > 0, near)
    largest = float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
    text = f"{int(unequal.sum()):,} of {unequal.numel():,} values differ, by up to {largest:.6g}"
    return ", ".join(filter(None, (dtypes, text))), largest


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a quantized or sparse tensor to a dense one."""
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Boolean mask of equal values or pairs of NaN; exact for integers of any size, too."""
    if one.is_complex() or other.is_complex():
        pairs = [torch.view_as_real(it.to(torch.complex128)) for it in (one, other)]
        return _are_equal(*pairs).all(-1)
    if one.is_floating_point() is not other.is_floating_point():
        # They are equal if float64 holds the float's value and converts back to the integer.
        whole, real = (other, one) if one.is_floating_point() else (one, other)
        rounded = whole.to(torch.float64)
        return (rounded == real.to(torch.float64)) & (rounded.to(whole.dtype) == whole)
    if one.is_floating_point():
        one, other = one.to(torch.float64), other.to(torch.float64)
        return (one == other) | (one.isnan() & other.isnan())
    # Large uint64 values have the bits of negative int64 values.
    bits = one.to(torch.int64), other.to(torch.int64)
    equal = bits[0] == bits[1]
    return equal if one.dtype.is_signed is other.dtype.is_signed else equal & (bits[0] >= 0)


def migrate(options: argparse.Namespace) -> int:
    """Print the replacement of another strategy in a file."""
    found = read_file(options.file)
    print(printable(migration_report(found)))
    return 1 if any(each.translation.loses for each in found) else 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    each.__name__: each
    for each in (verify, inspect, consolidate, metadata, diff, migrate, plan, probe, report)
}


def _check_ckpt_options(options: argparse.Namespace) -> None:
    if options.dtype:
        raise UsageError(
            "a .ckpt file keeps the dtypes of the training: --dtype is for safetensors files"
        )
    if options.max_shard_size:
        raise UsageError("a .ckpt file is one file: --max-shard-size is for safetensors files")
    if options.adapter:
        raise UsageError("peft reads adapters from a safetensors file: -o NAME.safetensors")
    if not options.weights_only and (options.ema or options.strip_prefix):
        raise UsageError(
            "a whole .ckpt file is as the training saved it: --ema and --strip-prefix go with "
            "--weights-only"
        )


def _require_checkpoint(path: Location, foreign: bool) -> Location:
    """Return the path if it may be a checkpoint of the wanted kind; its reader checks the rest."""
    _refuse_safetensors(path)
    if foreign:
        path.local_only(FOREIGN)
    elif path.is_file():
        return path
    own, theirs = (path / MANIFEST).is_taken(), path.holds(DCP_METADATA)
    if not own and not path.is_taken():
        raise CheckpointError(f"{path} does not exist{what_lies_beside(path)}")
    if not own and not path.is_dir():
        raise CheckpointError(f"{path} is no directory: expected that of a sharded checkpoint")
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


def _refuse_safetensors(path: Location) -> None:
    """Refuse a safetensors file, and the index of several, also by the name that one would have."""
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        index = path.parent / f"{path.name}.index.json"
        found = next((each for each in (path, index) if each.is_file()), None)
        if found is not None:
            raise CheckpointError(
                f"{found} is of safetensors, which are not taken here: expected a checkpoint, a "
                f"directory or a .ckpt file. Give the one that they were made of"
            )


@contextmanager
def _progress(title: str, quiet: bool = False) -> Generator[tuple[Progress, Progress]]:
    """Show a progress bar on a terminal.

    Yields one function to call with the total number of bytes, and one for each increment.
    """
    hidden = quiet or not sys.stderr.isatty()
    with tqdm(
        desc=title, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=hidden
    ) as bar:
        yield bar.reset, bar.update


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
    return {
        "path": str(found.path),
        "good": found.good,
        "step": found.step,
        "nbytes": found.nbytes,
        "seconds": round(seconds, 3),
        "damages": damages,
        "unchecked": found.unchecked,
    }
