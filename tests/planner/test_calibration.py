"""Constants are those that a probe or a run was made with, plans say so, and wrong files are told apart."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardeddp.errors import ConfigurationError
from shardeddp.plan.hardware import GPUS
from shardeddp.planner.calibration import (
    PROBED,
    RECORDED,
    TIME_ERROR,
    Device,
    Recorded,
    calibrate,
    read,
    write,
)
from shardeddp.planner.cost import FITTED, Step
from shardeddp.planner.plan import Plan, make_plan
from shardeddp.planner.search import Planned
from shardeddp.planner.transformer import Dimensions
from shardeddp.planner.view import run_page
from shardeddp.report import human_seconds
from support.probes import CPU, FIGURES, KNOWN, probe_of

pytestmark = pytest.mark.timeout(60)

DIMENSIONS = Dimensions(layers=3, width=64, heads=4, vocabulary=128, rope=False)


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    write(tmp_path / "probe.json", probe_of())
    return tmp_path / "probe.json"


def plan(*files: Path, **options: Any) -> Plan:
    given = {"gpus": 2, "length": 32, "micro_batches": (4,), "recomputes": ("none",), **options}
    return make_plan(DIMENSIONS, precisions=("32-true",), calibrate=files, **given)


def shown(found: Plan) -> str:
    """What it prints, in one line."""
    return " ".join(str(found).split())


def run_of(planned: Planned, path: Path, device: Device = CPU, **times: float) -> Path:
    """What a run has recorded whose parts took so many times as long as planned."""
    step = planned.step
    recorded = Recorded(
        name="a decoder",
        device=device,
        steps=100,
        parts={
            "compute": times.get("compute", 1.0) * (step.compute + step.launch),
            "gather": times.get("exposed", 1.0) * step.gathers,
            "reduction": times.get("exposed", 1.0) * step.reductions,
            "optimizer": times.get("optimizer", 1.0) * step.optimizer,
            "rest": 0.0,
        },
        gathers={"(root)": times.get("exposed", 1.0) * step.gathers},
        reductions={},
        figures={"shardeddp/tokens_per_s": planned.tokens_per_second},
        memory=vars(planned.memory),
        task=planned.task,
    )
    write(path, recorded)
    return path


# -- Constants


def test_a_probe_gives_the_constants_of_the_device_that_it_was_made_on(probe: Path) -> None:
    found = calibrate([probe])
    assert found.figures == pytest.approx(FIGURES)
    for name, value in vars(KNOWN).items():
        if name not in ("rates", "launch_backward"):
            assert getattr(found.constants, name) == pytest.approx(value, rel=1e-3), name
    for kind, speed in KNOWN.rates.items():
        assert found.constants.rates[kind] == pytest.approx(speed)


def test_a_probe_of_a_known_gpu_keeps_its_data_sheet_and_says_what_share_is_reached(
    tmp_path: Path,
) -> None:
    half = {"matmul": 0.5, "attention": 0.2}
    measured = probe_of(replace(KNOWN, **half))
    both = [replace(it, dtype=dtype) for it in measured.compute for dtype in ("fp32", "bf16")]
    compute = [it for it in both if it.seconds != measured.compute[1].seconds]
    device = replace(CPU, name="H100-80", ranks=8, per_node=8)
    write(tmp_path / "a", replace(measured, device=device, compute=compute))
    found = calibrate([tmp_path / "a"])
    peak = GPUS["H100-80"].bf16_tflops
    assert found.figures == {}
    assert found.constants.matmul == pytest.approx(0.05 / peak / GPUS["H100-80"].best, rel=1e-3)
    assert found.constants.attention == pytest.approx(0.02 / peak, rel=1e-3)
    assert found.constants.link == pytest.approx(2.0 / GPUS["H100-80"].link_gbs)
    assert found.constants.rates["H100-80"] == 1.0


def test_between_nodes_the_measured_network_takes_the_place_of_a_usual_one(tmp_path: Path) -> None:
    measured = probe_of()
    across = [replace(it, ranks=4, nbytes=2 * it.nbytes) for it in measured.collectives]
    slower = [replace(it, seconds=4 * it.seconds) for it in across]
    device = replace(CPU, ranks=4)
    write(
        tmp_path / "a",
        replace(measured, device=device, collectives=[*measured.collectives, *slower]),
    )
    found = calibrate([tmp_path / "a"])
    # Rings of a node's two ranks share its network: 1.5 times as much is sent in 4 times the time.
    assert found.network_gbits == pytest.approx(8 * 2.0 * 3 / 4 / 2)
    assert found.constants.network == 1.0
    stated = calibrate([tmp_path / "a"], network_gbits=12.0)
    assert stated.network_gbits == 12.0
    assert stated.constants.network == pytest.approx(0.5)


TIMES = [{"compute": 1.3}, {"optimizer": 0.4}, {"exposed": 2.5}, {"compute": 0.8, "exposed": 0.7}]


@pytest.mark.loop(1)
@pytest.mark.parametrize("times", TIMES)
def test_the_plan_of_a_run_takes_as_long_as_the_run(
    tmp_path: Path, times: dict[str, float]
) -> None:
    options: dict[str, Any] = {"strategies": ("full_shard",), "gpu": "A100-80"}
    planned = plan(**options).best
    run = run_of(planned, tmp_path / "run", replace(CPU, name="A100-80"), **times)
    before, after = planned.step, plan(run, **options).best.step
    compute, exposed = times.get("compute", 1.0), times.get("exposed", 1.0)
    assert after.compute + after.launch == pytest.approx(compute * (before.compute + before.launch))
    assert after.optimizer == pytest.approx(times.get("optimizer", 1.0) * before.optimizer)
    assert after.gathers + after.reductions == pytest.approx(
        exposed * (before.gathers + before.reductions), rel=1e-3
    )


@pytest.mark.slow
def test_what_split_layers_wait_for_is_in_the_computing_of_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gpus": 4, "tensor_parallel_sizes": (2,), "gpu": "A100-80"}
    planned = plan(**options, strategies=("full_shard",)).best
    device = replace(CPU, name="A100-80", ranks=4, per_node=4)
    run = run_of(planned, tmp_path / "run", device, compute=1.3)
    recorded, step = read(run), plan(run, **options, strategies=("full_shard",)).best.step
    assert isinstance(recorded, Recorded) and step.exchanges == planned.step.exchanges > 0
    assert step.total == pytest.approx(sum(recorded.parts.values()))


@pytest.mark.loop(1)
@pytest.mark.parametrize("times", TIMES)
def test_where_the_host_computes_a_run_s_network_is_that_of_the_probe(
    probe: Path, times: dict[str, float]
) -> None:
    """A run cannot tell what transfers cost computing beside them from computing itself."""
    options: dict[str, Any] = {"strategies": ("full_shard",)}
    planned = plan(probe, **options).best
    run = run_of(planned, probe.with_name("run"), **times)
    recorded, step = read(run), plan(run, probe, **options).best.step
    assert isinstance(recorded, Recorded)
    assert step.total == pytest.approx(sum(recorded.parts.values()))
    constants, measured = calibrate([run, probe]).constants, calibrate([probe]).constants
    for name in ("link", "latency_us", "interferences"):
        assert getattr(constants, name) == pytest.approx(getattr(measured, name)), name


@pytest.mark.loop(1)
@pytest.mark.parametrize("count", [1, 3])
def test_the_host_s_time_grows_with_the_collectives_that_a_strategy_issues(
    probe: Path, count: int
) -> None:
    options: dict[str, Any] = {"micro_batches": (4,), "global_batch": 8 * count}
    times: dict[str, float] = {}
    for name, issued in {
        "no_shard": 4,  # reductions of the root and three layers
        "shard_optimizer": 8,
        "shard_grad_op": 8 * count,
        "full_shard": 10 * count,  # the root and the last layer are gathered once
    }.items():
        best = plan(probe, strategies=(name,), **options).best
        assert sum(it.times for it in best.task.collectives) == issued
        times[name] = best.step.launch - 1e-6 * KNOWN.collective_us * issued
    beside = 1e-3 * (KNOWN.micro_batch_ms * count + KNOWN.step_ms)
    assert [*times.values()] == pytest.approx([beside] * 4, rel=2e-3)


@pytest.mark.slow
def test_each_kind_of_collective_slows_computing_by_its_own_measure(tmp_path: Path) -> None:
    found: dict[str, Step] = {}
    for kind in ("none", "all_gather", "all_reduce"):
        costs = {**KNOWN.interferences, **({} if kind == "none" else {kind: 1.4})}
        write(tmp_path / kind, probe_of(interference=costs))
        (only,) = plan(tmp_path / kind, strategies=("no_shard",)).plans
        found[kind] = only.step
    assert found["all_gather"].total == pytest.approx(found["none"].total)
    assert found["all_reduce"].reductions > 1.2 * found["none"].reductions


# -- What plans say


def test_a_plan_without_files_is_that_of_the_fitted_constants() -> None:
    found = plan(gpu="A100")
    assert calibrate([]).constants is FITTED
    assert found.best.relative_error == pytest.approx(TIME_ERROR)
    assert "Calibrated" not in shown(found)


@pytest.mark.slow
def test_a_plan_says_what_was_calibrated_with_what_and_how_far_it_may_be_off(
    probe: Path,
) -> None:
    probed = plan(probe)
    assert probed.cluster.gpu.name == "CPU"
    assert probed.best.relative_error == pytest.approx(PROBED)
    assert f"Calibrated with {probe} (2 x CPU): matmul 0.1 TFLOP/s in fp32" in shown(probed)
    assert "within 10 %, without measurements 11 %" in shown(probed)
    recorded = plan(probe, run_of(probed.best, probe.with_name("run.json"), compute=1.25))
    assert PROBED < recorded.best.relative_error < RECORDED, "collectives are as the probe says"
    assert "(100 steps on 2 x CPU): times what was planned, compute 1.25" in shown(recorded)
    low, high = json.loads(recorded.as_json())[0]["step_interval"]
    share = recorded.best.relative_error
    assert high / low == pytest.approx((1 + share) / (1 - share))


def test_a_probe_of_a_busy_machine_leaves_a_wide_interval(tmp_path: Path) -> None:
    write(tmp_path / "busy", probe_of(spread=0.4))
    found = plan(tmp_path / "busy")
    assert found.best.relative_error == pytest.approx(0.4)
    assert "repetitions within 40 %" in shown(found)


def test_a_probe_whose_own_steps_are_not_fitted_leaves_a_wide_interval(tmp_path: Path) -> None:
    measured = probe_of()
    *others, last = measured.compute
    odd = replace(last, backward_s=9 * last.backward_s)
    write(tmp_path / "odd", replace(measured, compute=[*others, odd]))
    found = plan(tmp_path / "odd")
    assert found.best.relative_error > 2 * PROBED
    assert json.loads(found.as_json())[0]["step_interval"][0] >= 0


def test_parts_that_were_not_measured_keep_their_interval(tmp_path: Path) -> None:
    write(tmp_path / "alone", probe_of(collectives=[], interference={}))
    found = plan(tmp_path / "alone", gpu_figures={"link_gbs": 0.2})
    assert PROBED < found.best.relative_error < TIME_ERROR


def test_a_probe_of_one_rank_plans_one_rank_and_asks_for_the_link_of_more(tmp_path: Path) -> None:
    write(tmp_path / "alone", probe_of(collectives=[], interference={}))
    assert plan(tmp_path / "alone", gpus=1).best.step.gathers == 0
    with pytest.raises(ConfigurationError, match="--link-gbs"):
        plan(tmp_path / "alone")


def test_bars_of_a_run_and_its_plan_have_one_scale_and_the_colours_are_named(probe: Path) -> None:
    run = read(
        run_of(plan(probe, strategies=("no_shard",)).best, probe.with_name("run"), compute=2.0)
    )
    assert isinstance(run, Recorded)
    page = run_page(run, calibrate([probe]))
    planned = run.planned(calibrate([probe]))
    assert planned is not None
    widths = [float(it) for it in re.findall(r"<svg width='([0-9.]+)' height='56'>", page)]
    assert widths == pytest.approx([900, 900 * planned[0].total / sum(run.parts.values())], abs=0.1)
    drawn = set(re.findall(r"fill='(#\w+)'", page))
    assert drawn == set(re.findall(r"<i style='background:(#\w+)'>", page))
    assert "gather 0" not in page, "what takes no time is left out"


def test_the_page_of_a_run_has_its_parts_beside_the_planned_ones(probe: Path) -> None:
    run = read(run_of(plan(probe).best, probe.with_name("run"), compute=2.0))
    assert isinstance(run, Recorded)
    page = run_page(replace(run, name="<a>", gathers={"blocks.<0>": 0.25}), calibrate([probe]))
    assert "<title>&lt;a&gt;</title>" in page
    assert f"A step: {human_seconds(sum(run.parts.values()))}" in page
    assert "blocks.&lt;0&gt; 0.25 s" in page
    assert "Waiting for reductions" not in page
    for part in ("compute", "optimizer", "As planned: ", "tokens_per_s", "units in flight"):
        assert part in page
    unknown = run_page(run, calibrate([]))
    assert "As planned" not in unknown
    assert "The planner has no figures of CPU" in unknown


def test_the_page_of_a_run_without_planned_memory_has_none(probe: Path) -> None:
    run = read(run_of(plan(probe).best, probe.with_name("run.json")))
    assert isinstance(run, Recorded)
    assert "Memory as planned: 0" in run_page(replace(run, memory={}), calibrate([probe]))


# -- Wrong files


def test_a_run_that_no_factor_on_its_plan_reaches_is_an_error(probe: Path) -> None:
    run = run_of(plan(probe).best, probe.with_name("run.json"), compute=1e-6, exposed=0.01)
    with pytest.raises(ConfigurationError, match=f"^{run}: computing and communication took"):
        calibrate([probe, run])


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(Path("probe.json").read_text())
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda it: it.update(version=99), "another version of shardeddp has written it"),
        (lambda it: it.update(shardeddp="plan"), "found other JSON"),
        (lambda it: it.pop("host"), "expected device, compute, host"),
        (lambda it: it.update(more=1), "expected device, compute, host"),
        (lambda it: it.update(memory_gbs=0), "memory_gbs is 0, expected more than 0"),
        (lambda it: it.update(memory_gbs=math.nan), "memory_gbs: expected a finite number"),
        (lambda it: it.update(memory_gbs=math.inf), "memory_gbs: expected a finite number"),
        (lambda it: it.update(memory_gbs="20"), "memory_gbs: expected a finite number"),
        (lambda it: it.update(memory_gbs=True), "memory_gbs: expected a finite number"),
        (lambda it: it["device"].update(ranks=2.5), "device: ranks: expected a finite number"),
        (lambda it: it["device"].update(name=3), "device: name: expected something else"),
        (lambda it: it["compute"][2].update(seconds=-1), r"compute\[2\]: seconds: expected a fin"),
        (lambda it: it["compute"][2].update(seconds=0), r"compute\[2\]: seconds is 0"),
        (lambda it: it["collectives"][0].update(seconds=0), r"collectives\[0\]: seconds is 0"),
        (lambda it: it["compute"].clear(), "compute lacks matmuls of fp32 and bf16"),
        (lambda it: it.update(collectives=3), "collectives: expected something else, found 3"),
        (lambda it: it.update(shardeddp=[]), "found other JSON"),
        (lambda it: it.update(shardeddp={}), "found other JSON"),
        (lambda it: it.update(memory_gbs=10**400), "memory_gbs: expected a finite number"),
        (lambda it: it["device"].update(ranks=3, per_node=2), "device: "),
        (
            lambda it: it.update(
                collectives=[one for one in it["collectives"] if one["kind"] != "all_gather"]
            ),
            "collectives: expected an all_gather of 2 ranks beside the other kinds",
        ),
    ],
)
def test_a_file_with_figures_that_nothing_can_have_measured_is_an_error(
    probe: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    monkeypatch.chdir(probe.parent)
    probe.write_text(changed(change))
    with pytest.raises(ConfigurationError, match=f"^{probe}.*{said}"):
        calibrate([probe])


@pytest.mark.loop(1)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda it: it["parts"].pop("gather"), "parts: gather missing"),
        (lambda it: it["parts"].update(compute=0, rest=0), "parts: compute missing, or 0"),
        (lambda it: it["parts"].update(compute=-1), "parts: compute: expected a finite number"),
        (lambda it: it["gathers"].update(a=math.nan), "gathers: a: expected a finite number"),
        (lambda it: it.update(steps=0), "steps is 0, expected more than 0"),
        (lambda it: it["task"]["setting"].update(fp32=1), "fp32: expected something else"),
        (lambda it: it["task"]["setting"].update(recomputes=[]), "recomputes: expected 3 values"),
        (
            lambda it: it["task"]["collectives"][0].update(kind="scatter"),
            r"collectives\[0\]: kind: expected something else, found 'scatter'",
        ),
        (lambda it: it["task"]["setting"].update(micro_batches=0), "micro_batches is 0"),
        (lambda it: it["task"]["collectives"][0].update(stride=0), "stride is 0"),
        (lambda it: it["device"].update(ranks=3, per_node=2), "device: "),
    ],
)
def test_a_run_with_figures_that_nothing_can_have_measured_is_an_error(
    probe: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    monkeypatch.chdir(probe.parent)
    run_of(plan(probe).best, probe)
    probe.write_text(changed(change))
    with pytest.raises(ConfigurationError, match=f"^{probe}.*{said}"):
        calibrate([probe])


@pytest.mark.parametrize(
    "text", ["", "nothing", '{"version": 1', "[]", "3", "null", "{}", "[" * 100_000]
)
def test_another_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(ConfigurationError, match=r"expected a file of `shardeddp probe` or"):
        calibrate([tmp_path / "a"])


def test_a_file_of_another_device_is_an_error(probe: Path) -> None:
    with pytest.raises(ConfigurationError, match="measured on CPU, and the plan is for A100-80"):
        plan(probe, gpu="A100")
    other = probe.with_name("other")
    write(other, replace(probe_of(), device=replace(CPU, name="H100-80")))
    with pytest.raises(ConfigurationError, match="was measured on"):
        calibrate([probe, other])
    assert plan(probe, gpu="cpu").cluster.gpu.name == "CPU"


def test_a_run_on_a_device_without_figures_asks_for_a_probe(probe: Path) -> None:
    run = run_of(plan(probe).best, probe.with_name("run"))
    with pytest.raises(ConfigurationError, match="a file of `shardeddp probe` on the same machine"):
        plan(run)
