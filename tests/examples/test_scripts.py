"""The scripts in `examples/` that people copy: each is short, and trains in a process of its own."""

import json
import re
from pathlib import Path

import pytest
import torch

from support.example_scripts import EXAMPLES, run

SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
LONGER = {"train_gpt.py"}
"""A command line that reports and compares, and no script to copy."""

pytestmark = pytest.mark.timeout(380)


def losses(printed: str) -> dict[int, str]:
    """Loss by step, as it was printed."""
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed)}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in LONGER])
def test_a_script_to_copy_is_short_and_says_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert f"python examples/{name}" in text
    assert f"]({name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.slow
def test_the_shortest_script_leaves_an_ordinary_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, str(EXAMPLES / "train.py"))
    saved = torch.load(tmp_path / "regression.ckpt", weights_only=True)
    assert saved["global_step"] == 2 * 32
    assert list(saved["state_dict"]) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    assert saved["state_dict"]["net.0.weight"].shape == (256, 8)


@pytest.mark.long
@pytest.mark.slow
def test_the_vision_transformer_learns_the_patterns(tmp_path: Path) -> None:
    out = run(tmp_path, str(EXAMPLES / "vision.py"), "--epochs", "2", "--images", "512")
    (accuracy, path) = re.search(r"best accuracy ([\d.]+) in (\S+)", out).groups()  # type: ignore[union-attr]
    assert float(accuracy) > 0.3, "ten classes, so a guess is right in a tenth"
    assert Path(path).is_file()


@pytest.mark.long
@pytest.mark.slow
def test_the_gan_moves_its_points(tmp_path: Path) -> None:
    out = run(tmp_path, str(EXAMPLES / "gan.py"), "--steps", "60")
    radius = float(re.search(r"mean radius ([\d.]+)", out)[1])  # type: ignore[index]
    assert 0.5 < radius < 3, "an untrained generator stays near 0"


@pytest.mark.long
@pytest.mark.slow
def test_the_stream_goes_on_with_the_losses_of_a_run_that_was_not_stopped(tmp_path: Path) -> None:
    script = str(EXAMPLES / "pretrain_stream.py")
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder in (stopped, whole):
        folder.mkdir()
    first = losses(run(stopped, script, "--steps", "10"))
    second = losses(run(stopped, script, "--steps", "13"))
    assert list(second) == [10, 11, 12]
    assert first | second == losses(run(whole, script, "--steps", "13"))


@pytest.mark.long
@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "outputs are not committed"
    out = run(tmp_path, "-c", "\n\n".join(cells))
    assert float(re.search(r"mean squared error ([\d.]+)", out)[1]) < 1  # type: ignore[index]
