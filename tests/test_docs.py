"""Documentation: links lead somewhere, and quoted messages, outputs and numbers are those of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import shardeddp
from shardeddp.plan.memory import HeldMemory
from training import Sharding, Trial, batch
from world import Worlds

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/**/*.md",
        "configs/*.md",
        "benchmarks/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"(?:\]\(|^\[[^\]]+\]: )([^)\s#]*)(?:#([^)\s]*))?", flags=re.MULTILINE)
FOREIGN = {
    "IsADirectoryError",
    "Option '...' is not accepted",
    "The total norm of order 2.0 ... is non-finite",
    "Unknown type name 'nn.Module'",
    "You selected an invalid strategy name: ... for lightning.pytorch.Trainer",
    "expected scalar type BFloat16 but found Float",
}
"""Messages of Lightning, jsonargparse and torch."""
OF_TORCH = {"DTensor", "DeviceMesh", "Function", "UntypedStorage"}


def text_of(page: Path) -> str:
    """The page without its blocks of code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """What a heading is called in an address."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_the_first_script_is_shown_as_it_is() -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    script = (ROOT / "examples" / "train.py").read_text(encoding="utf-8").rstrip()
    assert f"```python\n{script}\n```" in page


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files_and_to_headings(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(text_of(page)):
        if ":" in target:
            continue
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        known = path.exists() and (
            not anchor or path.suffix != ".md" or anchor in anchors(path.relative_to(ROOT))
        )
        if not known:
            broken.append(f"{target}#{anchor}")
    assert broken == []


@cache
def literals() -> list[str]:
    """Every text of the package as one reads it, with a gap where a value is filled in."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.ClassDef):
                found.append(node.name)
    return found


def is_said(message: str) -> bool:
    """Whether all fragments of a message stand in one text of the code."""
    fragments = [part.strip() for part in message.split("...") if len(part.strip()) > 3]
    return any(all(part in text for part in fragments) for text in literals())


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    rows = re.findall(
        r"^\| `([^`]+)`", text_of(Path("docs/troubleshooting.md")), flags=re.MULTILINE
    )
    assert len(rows) > 30
    assert [row for row in rows if row not in FOREIGN and not is_said(row)] == []


@cache
def class_files() -> dict[str, str]:
    """Text of the files that define a class, by the name of the class."""
    found = dict[str, str]()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^ *class (\w+)", text, flags=re.MULTILINE):
            found[name] = found.get(name, "") + text
    return found


@pytest.mark.parametrize("page", ["docs/decisions/README.md", "docs/parameters-day.md"])
def test_files_and_members_that_a_page_names_are_there(page: str) -> None:
    quoted = re.findall(r"`([^`\n]+)`", text_of(Path(page)))
    files = [name for name in quoted if name.endswith(".py")]
    assert len(files) > 15
    places = (ROOT, ROOT / "src/shardeddp")
    lost = [name for name in files if not any((place / name).exists() for place in places)]
    for owner, member in (it.split(".") for it in quoted if re.fullmatch(r"[A-Z]\w+\.\w+", it)):
        text = class_files().get(owner, member if owner in OF_TORCH else "")
        if not re.search(rf"\b{member}\b", text):
            lost.append(f"{owner}.{member}")
    assert lost == []


def test_the_index_of_decisions_is_complete() -> None:
    page = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| \[(.+)\]\(.+ \| (.+) \|$", page, flags=re.MULTILINE)
    titles = re.findall(r"^## (\d+)\. (.+)$", page, flags=re.MULTILINE)
    assert [(number, title) for number, title, _ in rows] == titles
    kinds = "holds|holds; extended by|superseded by|in part superseded by"
    assert [it for *_, it in rows if not re.fullmatch(rf"({kinds})( \d+,?)*", it)] == []


def test_the_reference_lists_all_that_the_package_offers() -> None:
    listed = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in shardeddp.__all__ if not re.search(rf"\b{name}\b", listed)] == []


def test_every_configuration_is_listed() -> None:
    page = (ROOT / "configs/README.md").read_text(encoding="utf-8")
    files = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
    assert sorted(re.findall(r"^\| \[`(.+?)`\]", page, flags=re.MULTILINE)) == files


DAY = (ROOT / "docs/parameters-day.md").read_text(encoding="utf-8")


def test_a_parameters_day_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", DAY, flags=re.DOTALL)
    assert found is not None
    exec(found[1], {})
    assert capsys.readouterr().out == found[2]


def test_a_parameters_day_names_functions_of_the_files_beside_them() -> None:
    cells = re.findall(r"\| (`\w+/[^|]*) \|$", DAY, flags=re.MULTILINE)
    assert len(cells) > 15
    for place in ";".join(cells).split(";"):
        file, *names = re.findall(r"`([^`]+)`", place)
        text = (ROOT / "src/shardeddp" / file).read_text(encoding="utf-8")
        for name in names:
            assert all(re.search(rf"(def|class) {it}\b", text) for it in name.split(".")), place


def test_classes_of_decisions_exist() -> None:
    classes = re.findall(r"`(\w+)` \|$", DAY.partition("| class |")[2], flags=re.MULTILINE)
    assert len(classes) > 5
    assert [name for name in classes if name not in class_files()] == []


class Block(nn.Module):
    """One block of the model of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Small(nn.Module):
    """The model of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def mean_square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 4, 6)).pow(2).mean()


def sent_and_held() -> tuple[int, list[HeldMemory]]:
    """Bytes that a rank sends in the third step, and has of each unit behind it."""
    trial = Trial(Small(), Sharding(units=("layers.*",)))
    trial.train(mean_square, steps=2)
    trial.runtime.mesh.traffic.reset()
    trial.forward(mean_square, 2).backward()
    held = [progress.unit.held() for progress in trial.runtime.progresses]
    return trial.runtime.mesh.traffic.total_nbytes, held


@pytest.mark.slow
def test_numbers_of_a_parameters_day_are_those_of_a_step(world: Worlds) -> None:
    assert "| weights | 544 | 144;" in DAY and "| gradients | 544 | 144;" in DAY
    for sent, held in world(4).run(sent_and_held):
        assert f"a rank sends {sent:,} bytes" in DAY
        assert held[2] == HeldMemory(main_nbytes=144, gradient_nbytes=144)
