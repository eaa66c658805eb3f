"""Documentation: links lead somewhere, and quoted messages are those of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

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


def test_owners_of_truths_are_classes() -> None:
    table = (ROOT / "docs/parameters-day.md").read_text(encoding="utf-8").partition("| owner |")[2]
    owners = re.findall(r"`(\w+)` \|$", table, flags=re.MULTILINE)
    assert len(owners) > 5
    assert [name for name in owners if name not in class_files()] == []
