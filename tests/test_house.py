"""The tree keeps the house rules, and each rule still sees what breaks it."""

import ast
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import house_rules as house
from house_rules import SRC, Finding, Source

ROOT = Path(__file__).resolve().parents[1]

EXCUSED: dict[tuple[str, str, str], str] = {
    (
        "state_by_hasattr",
        f"{SRC}tensor/unsharded.py",
        "vars(self).get(SHARDED)",
    ): "torch asks a parameter that it is making for attributes, before it refers to the sharded one",
}
"""(rule, file, subject of the finding) -> why this one stays."""

Rule = Callable[[Sequence[Source]], Iterator[Finding]]
RULES: list[Rule] = [
    house.upward_imports,
    house.import_circles,
    house.imports_in_functions,
    house.impure_plans,
    house.borrowed_privates,
    house.foreign_privates,
    house.stray_torch_privates,
    house.stray_collectives,
    house.foreign_engines,
    house.stray_lightning,
    house.missing_docstrings,
    house.missing_annotations,
    house.unknown_arguments,
    house.concrete_overrides,
    house.state_by_hasattr,
    house.default_devices,
    house.machine_paths,
]
OF_EVERY_FILE = (house.machine_paths,)
OF_ALL_PYTHON = (house.missing_docstrings, house.missing_annotations)


@cache
def project() -> tuple[Source, ...]:
    """Every file that is tracked or could be; without git, what lies outside hidden and generated folders."""
    try:
        command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        folders = ("src", "tests", "examples", "configs", "docs", "benchmarks")
        names = [
            path.relative_to(ROOT).as_posix()
            for folder in folders
            for path in (ROOT / folder).rglob("*")
        ]
        names = [name for name in names if "__pycache__" not in name and ".egg-info" not in name]
    paths = [ROOT / name for name in sorted(set(names))]
    return tuple(
        Source(
            path=path.relative_to(ROOT).as_posix(),
            text=path.read_text(encoding="utf-8", errors="replace"),
        )
        for path in paths
        if path.is_file()
    )


def under_the_rule(rule: Rule) -> list[Source]:
    if rule in OF_EVERY_FILE:
        return list(project())
    return [
        file
        for file in project()
        if file.path.endswith(".py") and (rule in OF_ALL_PYTHON or file.path.startswith(SRC))
    ]


def broken(rule: Rule) -> list[str]:
    """What the tree does against the rule, without what is excused."""
    findings = rule(under_the_rule(rule))
    return [
        str(found)
        for found in findings
        if (rule.__name__, found.path, found.subject) not in EXCUSED
    ]


def test_a_file_imports_only_from_its_own_layer_or_a_lower_one() -> None:
    assert broken(house.upward_imports) == []


def test_no_file_imports_itself_through_others() -> None:
    assert broken(house.import_circles) == []


def test_no_import_hides_inside_a_function() -> None:
    assert broken(house.imports_in_functions) == []


def test_plans_import_the_standard_library_only() -> None:
    assert broken(house.impure_plans) == []


def test_private_names_stay_in_their_file() -> None:
    assert broken(house.borrowed_privates) == []


def test_private_names_of_lightning_stand_in_one_file() -> None:
    assert broken(house.foreign_privates) == []


def test_private_names_of_torch_stand_in_one_file() -> None:
    assert broken(house.stray_torch_privates) == []


def test_collectives_are_issued_in_comm_only() -> None:
    assert broken(house.stray_collectives) == []


def test_the_package_does_without_the_sharding_engines_of_torch() -> None:
    assert broken(house.foreign_engines) == []


def test_lightning_is_known_to_one_package_only_and_from_two_files() -> None:
    assert broken(house.stray_lightning) == []


@pytest.mark.long
@pytest.mark.slow
def test_every_file_starts_by_saying_what_it_is() -> None:
    assert broken(house.missing_docstrings) == []


def test_every_argument_and_every_result_has_a_type() -> None:
    assert broken(house.missing_annotations) == []


def test_arguments_that_are_described_are_parameters() -> None:
    assert broken(house.unknown_arguments) == []


def test_no_method_of_ours_replaces_another() -> None:
    assert broken(house.concrete_overrides) == []


def test_state_is_declared_and_not_discovered() -> None:
    assert broken(house.state_by_hasattr) == []


def test_tensors_name_their_device() -> None:
    assert broken(house.default_devices) == []


def test_no_tracked_file_names_a_path_of_somebodys_machine() -> None:
    assert broken(house.machine_paths) == []


def test_the_map_of_the_architecture_has_every_file_once_with_its_first_sentence() -> None:
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[1].splitlines()
    folder, found = "", dict[str, str]()
    for line in (line for line in tree if line[:1] == " "):
        name, _, sentence = line.strip().partition(" ")
        folder = "" if line[2] != " " else folder
        folder = name if name.endswith("/") else folder
        path = f"{SRC}{folder}{'__init__.py' if name.endswith('/') else name}"
        assert path not in found
        found[path] = sentence.strip()
    files = [
        file.path for file in project() if file.path.startswith(SRC) and file.path.endswith(".py")
    ]
    assert sorted(found) == files
    for path, sentence in found.items():
        docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
        assert sentence == docstring.splitlines()[0].rstrip("."), path


def test_the_questions_of_the_map_are_answered_by_files_and_names_that_exist() -> None:
    rows = (ROOT / "docs/architecture.md").read_text().partition("| question | files |")[2]
    answers = [line.split("|")[2] for line in rows.splitlines()[2:] if line.startswith("| ")]
    assert len(answers) == 8
    for answer in answers:
        quoted = re.findall(r"`([^`]+)`", answer)
        files = [name for name in quoted if name.endswith(".py")]
        text = "".join((ROOT / SRC / name).read_text() for name in files)
        names = [part for name in quoted if name not in files for part in name.split(".")]
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == [], answer


def test_methods_that_docstrings_and_comments_name_exist() -> None:
    files = [file for file in project() if file.path.startswith(SRC) and file.path.endswith(".py")]
    members: dict[str, set[str]] = {}
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                text = ast.get_source_segment(file.text, node) or ""
                members.setdefault(node.name, set()).update(re.findall(r"\w+", text))
    named = [
        (file.path, owner, member)
        for file in files
        for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", file.text)
        if owner in members
    ]
    assert len(named) > 50
    assert [each for each in named if each[2] not in members[each[1]]] == []


def test_names_of_public_classes_are_made_of_words_of_the_vocabulary() -> None:
    known = (ROOT / "docs/vocabulary.md").read_text().partition("## Words that are not used")[0]
    words = set(re.findall(r"[a-z]+", known.lower()))
    unknown = {
        f"{word.lower()} in {name}"
        for file in project()
        if file.path.startswith(SRC) and file.path.endswith(".py")
        for name in re.findall(r"^class ([A-Z]\w+)", file.text, flags=re.MULTILINE)
        for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]+", name)
        if not {word.lower(), word.lower() + "s", word.lower().removesuffix("s")} & words
    }
    assert sorted(unknown) == []


def test_words_that_the_vocabulary_has_replaced_are_not_used() -> None:
    table = (ROOT / "docs/vocabulary.md").read_text().partition("## Words that are not used")[2]
    words = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert "lane" in words
    pattern = re.compile(
        rf"(?<![a-z])({'|'.join(map(re.escape, words))})s?(?![a-z])", re.IGNORECASE
    )
    files = [file for file in project() if file.path.startswith(SRC)]
    used = [
        (file.path, found.group())
        for file in files
        for found in pattern.finditer(spaced(file.text))
    ]
    assert used == []


def spaced(text: str) -> str:
    """The text with the words of names apart: ``HostLane`` and ``host_lane`` have "lane"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", text)


def test_the_rules_are_given_the_package_and_its_tests() -> None:
    seen = {file.path for file in under_the_rule(house.missing_docstrings)}
    assert {f"{SRC}__init__.py", "tests/test_house.py", "tests/house_rules.py"} <= seen


@pytest.mark.long
@pytest.mark.slow
def test_every_excuse_has_a_reason_and_still_excuses_something() -> None:
    found = {
        (rule.__name__, f.path, f.subject) for rule in RULES for f in rule(under_the_rule(rule))
    }
    assert [
        key for key, reason in EXCUSED.items() if key not in found or len(reason.split()) < 4
    ] == []


# Each rule on sources that break it and on sources that keep it: {path inside the package: text}.

BREAKS: list[tuple[Rule, dict[str, str]]] = [
    (house.upward_imports, {"comm/mesh.py": "from shardeddp.engine.unit import Unit"}),
    (house.upward_imports, {"wrap/tree.py": "from shardeddp import engine"}),
    (house.upward_imports, {"engine/unit.py": "from .. import lightning"}),
    (house.upward_imports, {"engine/unit.py": "from ..report import table"}),
    (
        house.upward_imports,
        {"report.py": "def f() -> None:\n    import shardeddp.lightning.strategy"},
    ),
    (house.upward_imports, {"lightning/strategy.py": "from shardeddp import ShardedDP"}),
    (house.upward_imports, {"cli.py": "import shardeddp"}),
    (
        house.upward_imports,
        {"plan/cost.py": "if TYPE_CHECKING:\n    from shardeddp.comm.mesh import Mesh"},
    ),
    (house.upward_imports, {"helpers.py": ""}),
    (
        house.import_circles,
        {"plan/a.py": "from shardeddp.plan.b import x", "plan/b.py": "from . import a"},
    ),
    (
        house.import_circles,
        {"plan/__init__.py": "from .a import x", "plan/a.py": "from shardeddp.plan import y"},
    ),
    (
        house.import_circles,
        {
            "a.py": "import shardeddp.b",
            "b.py": "from .c import x",
            "c.py": "def f() -> None:\n    from .a import y",
        },
    ),
    (
        house.import_circles,
        {"a.py": "from .b import x", "b.py": "if TYPE_CHECKING:\n    from .a import y"},
    ),
    (house.imports_in_functions, {"wrap.py": "def f() -> None:\n    import json"}),
    (
        house.imports_in_functions,
        {
            "wrap.py": "class A:\n    async def f(self) -> None:\n        if 1:\n            import json"
        },
    ),
    (house.impure_plans, {"plan/layout.py": "import torch"}),
    (house.impure_plans, {"plan/layout.py": "from numpy import prod"}),
    (house.impure_plans, {"plan/layout.py": "from shardeddp.config import Offload"}),
    (house.impure_plans, {"plan/layout.py": "from ..comm import mesh"}),
    (house.borrowed_privates, {"wrap.py": "from shardeddp.plan.layout import _round_up"}),
    (house.borrowed_privates, {"plan/cost.py": "from . import layout\nlayout._round_up(3)"}),
    (
        house.borrowed_privates,
        {
            "lightning/a.py": "from shardeddp.lightning import namespace\nnamespace._is_installed('x')"
        },
    ),
    (
        house.foreign_privates,
        {"lightning/api.py": "from lightning.pytorch.core.saving import _load_state"},
    ),
    (
        house.foreign_privates,
        {"lightning/launchers.py": "def f(loop: Any) -> None:\n    loop._combined_loader = None"},
    ),
    (
        house.foreign_privates,
        {
            "lightning/a.py": "class A:\n    def f(self) -> None:\n        self._device = 1",
            "lightning/b.py": "x._device",
        },
    ),
    (house.foreign_privates, {"lightning/launchers.py": "vars(loop)['_data_fetcher']"}),
    (house.foreign_privates, {"lightning/launchers.py": "getattr(trainer, '_signal_connector')"}),
    (house.foreign_privates, {"lightning/launchers.py": "vars(loop).pop('_fetcher', None)"}),
    (house.foreign_privates, {"lightning/launchers.py": "vars(x).update(_on_signal=f)"}),
    (house.foreign_privates, {"lightning/launchers.py": "'_summary' in vars(x)"}),
    (
        house.foreign_privates,
        {
            "lightning/strategy.py": "class A(ParallelStrategy):\n    def f(self) -> None: self._layer_sync.x"
        },
    ),
    (
        house.stray_torch_privates,
        {"engine/unit.py": "import torch\ntorch._C._current_graph_task_id()"},
    ),
    (house.stray_torch_privates, {"engine/unit.py": "from torch.utils import _pytree as pytree"}),
    (house.stray_torch_privates, {"engine/unit.py": "from torch._dynamo import OptimizedModule"}),
    (
        house.stray_collectives,
        {"engine/unit.py": "import torch.distributed as dist\ndist.all_reduce(x)"},
    ),
    (
        house.stray_collectives,
        {"engine/unit.py": "import torch\ntorch.distributed.all_gather_into_tensor(x, y)"},
    ),
    (
        house.stray_collectives,
        {"engine/unit.py": "import torch.distributed\ntorch.distributed.barrier()"},
    ),
    (
        house.stray_collectives,
        {
            "engine/unit.py": "from torch import distributed\ndistributed.reduce_scatter_tensor(x, y)"
        },
    ),
    (
        house.stray_collectives,
        {"engine/unit.py": "from torch.distributed import broadcast as tell"},
    ),
    (
        house.stray_collectives,
        {
            "engine/unit.py": "from torch.distributed import distributed_c10d as c\nf = c.all_to_all_single"
        },
    ),
    (
        house.stray_collectives,
        {
            "lightning/strategy.py": "import torch.distributed as dist\ndist.init_process_group('gloo')"
        },
    ),
    (
        house.stray_collectives,
        {"lightning/strategy.py": "from torch.distributed.device_mesh import init_device_mesh"},
    ),
    (
        house.stray_collectives,
        {"report.py": "import torch.distributed as dist\ndist.send(x, 1)\ndist.new_group()"},
    ),
    (
        house.stray_collectives,
        {"wrap.py": "import torch\ntorch.ops._c10d_functional.all_reduce(x, 'sum', '0')"},
    ),
    (
        house.stray_collectives,
        {"wrap.py": "def f(group: ProcessGroup) -> None:\n    group.allreduce(x).wait()"},
    ),
    (house.foreign_engines, {"wrap.py": "from torch.distributed.fsdp import FSDPModule"}),
    (house.foreign_engines, {"wrap.py": "from torch.distributed import fsdp"}),
    (
        house.foreign_engines,
        {"wrap.py": "import torch.distributed as dist\ndist.fsdp.fully_shard(m)"},
    ),
    (house.foreign_engines, {"comm/mesh.py": "import_module('torch.distributed.fsdp')"}),
    (
        house.foreign_engines,
        {"comm/mesh.py": "from torch.distributed._composable import replicate"},
    ),
    (house.stray_lightning, {"engine/runtime.py": "from shardeddp.lightning.api import Trainer"}),
    (house.stray_lightning, {"lightning/checkpointing.py": "import lightning as L"}),
    (house.stray_lightning, {"report.py": "from lightning.pytorch import Callback"}),
    (
        house.stray_lightning,
        {"__init__.py": "from pytorch_lightning.strategies import StrategyRegistry"},
    ),
    (house.missing_docstrings, {"wrap.py": "import json\n'too late'"}),
    (house.missing_docstrings, {"plan/__init__.py": ""}),
    (house.missing_annotations, {"wrap.py": "def f(a, b: int) -> None: ..."}),
    (house.missing_annotations, {"wrap.py": "def f(a: int): ..."}),
    (house.missing_annotations, {"wrap.py": "def f(*args, **kwargs: int) -> None: ..."}),
    (
        house.missing_annotations,
        {"wrap.py": "class A:\n    def __init__(self, *, size=1) -> None: ..."},
    ),
    (
        house.missing_annotations,
        {"wrap.py": "class A:\n    @staticmethod\n    def f(x) -> None: ..."},
    ),
    (house.missing_annotations, {"wrap.py": "def f() -> None:\n    def g(cls) -> int: ..."}),
    (
        house.unknown_arguments,
        {"wrap.py": "def f(a: int) -> None:\n    '''F.\n\n    Args:\n        a, b: Two.\n    '''"},
    ),
    (
        house.unknown_arguments,
        {"wrap.py": "class A:\n    '''A.\n\n    Args:\n        a: One.\n    '''\n    a: int"},
    ),
    (
        house.concrete_overrides,
        {
            "a.py": "class A:\n    def f(self) -> int: return 1",
            "b.py": "class B(a.A[int]):\n    def f(self) -> int: return 2",
        },
    ),
    (house.state_by_hasattr, {"wrap.py": "hasattr(self, 'ready')"}),
    (house.state_by_hasattr, {"wrap.py": "getattr(self, name, None)"}),
    (house.state_by_hasattr, {"wrap.py": "hasattr(module, '_shardeddp_unit')"}),
    (house.state_by_hasattr, {"wrap.py": "'ready' not in self.__dict__"}),
    (house.state_by_hasattr, {"wrap.py": "vars(module).get('_shardeddp_unit')"}),
    (house.state_by_hasattr, {"wrap.py": "'ready' in vars(self)"}),
    (house.default_devices, {"comm/mesh.py": "torch.zeros(3, dtype=torch.uint8)"}),
    (house.machine_paths, {"wrap.py": "DATA = '" + "/home/" + "me/data'"}),
    (house.machine_paths, {"notes.md": "cd " + "/work/" + "main"}),
]

KEEPS: list[tuple[Rule, dict[str, str]]] = [
    (
        house.upward_imports,
        {
            "lightning/strategy.py": "import lightning\nfrom shardeddp.report import Table\nfrom .. import wrap"
        },
    ),
    (
        house.upward_imports,
        {
            "__init__.py": "from shardeddp.lightning.strategy import ShardedDP",
            "config.py": "from .errors import E",
        },
    ),
    (
        house.import_circles,
        {
            "plan/__init__.py": "from .a import x",
            "plan/a.py": "from . import b",
            "plan/b.py": "import json",
        },
    ),
    (
        house.imports_in_functions,
        {"wrap.py": "try:\n    import json\nexcept ImportError:\n    json = None"},
    ),
    (
        house.impure_plans,
        {
            "plan/a.py": "import os.path\nfrom .b import x\nfrom shardeddp.errors import E",
            "wrap.py": "import torch",
        },
    ),
    (
        house.borrowed_privates,
        {
            "wrap.py": "import torch\nfrom .plan import layout\ntorch._C.f()\nlayout.__name__\nself._x",
            "lightning/a.py": "from shardeddp.lightning.api import Trainer\nTrainer._run",
        },
    ),
    (
        house.foreign_privates,
        {
            "lightning/private.py": "loop._combined_loader",
            "lightning/a.py": "class A:\n    def f(self, it: A) -> None:\n        self._x = 1\n        it._x.__len__",
            "lightning/b.py": "class B(A):\n    def f(self) -> None:\n        self._x\n        vars(self)['_x']",
            "lightning/c.py": "import sys\nimport torch\ntorch._C.f()\nsys._getframe()\nmodule._parameters\nx.get('_')",
        },
    ),
    (
        house.stray_torch_privates,
        {
            "torch_private.py": "import torch\ntorch._C",
            "a.py": "import torch\ntorch.__version__\nmodule._parameters",
        },
    ),
    (
        house.stray_collectives,
        {"comm/backends.py": "import torch.distributed as dist\ndist.all_reduce(x)"},
    ),
    (
        house.stray_collectives,
        {"wrap.py": "import torch.distributed as dist\ndist.get_rank()\nx.scatter(0, i, y)"},
    ),
    (
        house.stray_collectives,
        {
            "engine/unit.py": "def f(comm: Collectives) -> None:\n    comm.all_gather(x)\n    comm.barrier()"
        },
    ),
    (house.foreign_engines, {"wrap.py": "from torch.distributed.tensor import DTensor"}),
    (
        house.stray_lightning,
        {
            "lightning/strategy.py": "from .api import Trainer",
            "lightning/api.py": "from lightning.pytorch import Trainer",
            "lightning/private.py": "from lightning.pytorch import Callback",
        },
    ),
    (house.missing_docstrings, {"wrap.py": '"""Policies."""'}),
    (
        house.missing_annotations,
        {
            "wrap.py": "class A:\n    @classmethod\n    def f(cls, x: int, *a: int, **k: int) -> None: ..."
        },
    ),
    (
        house.unknown_arguments,
        {
            "a.py": "class A:\n    '''A.\n\n    Args:\n        a: One,\n            b: or so.\n    Raises:\n"
            "        E: No.'''\n    def __init__(self, *a: int) -> None: ...",
            "b.py": "@dataclass\nclass B(A):\n    '''B.\n\n    Args:\n        a, b: Two.\n    '''\n    b: int = 1",
        },
    ),
    (
        house.concrete_overrides,
        {
            "a.py": "class A:\n    @abstractmethod\n    def f(self) -> int:\n        return 1\n    def g(self): ...",
            "b.py": "class B(A, Other):\n    def f(self) -> int: return 2\n    def g(self): return 3",
        },
    ),
    (
        house.state_by_hasattr,
        {
            "wrap.py": "hasattr(module, 'flatten_parameters')\ngetattr(fn, '__name__', '?')\ngetattr(self, name)"
        },
    ),
    (
        house.default_devices,
        {
            "comm/mesh.py": "torch.zeros(3, device='cpu')\ntorch.empty(*sizes, **options)\ntorch.zeros_like(x)",
            "planner/trace.py": "torch.zeros(3)",
        },
    ),
    (
        house.machine_paths,
        {
            "run.sh": "#!/usr/bin/env bash\nls >/dev/null https://example.org/home/page ~/work/x ${D}/tmp/x"
        },
    ),
]


def sources(texts: dict[str, str]) -> list[Source]:
    return [Source(path=SRC + path, text=text) for path, text in texts.items()]


@pytest.mark.parametrize(
    ("rule", "texts"), BREAKS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_rule_sees_a_source_that_breaks_it(rule: Rule, texts: dict[str, str]) -> None:
    assert [str(found) for found in rule(sources(texts))] != []


@pytest.mark.parametrize(
    ("rule", "texts"), KEEPS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_rule_leaves_a_source_that_keeps_it_alone(rule: Rule, texts: dict[str, str]) -> None:
    assert [str(found) for found in rule(sources(texts))] == []


def test_every_rule_is_proven_in_both_directions() -> None:
    assert {rule for rule, _ in BREAKS} == {rule for rule, _ in KEEPS} == set(RULES)


# -- Names that programs beside the package take from it: slow tests and benchmarks seldom run


def taken_names(path: Path) -> Iterator[tuple[str, str]]:
    """Modules and names in them that a file imports, reads or replaces."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules: dict[str, str] = {}  # by their name in the file
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                yield node.module, name.name
                modules[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in ast.walk(tree):  # names that are something else in a function
        if isinstance(node, ast.arg):
            modules.pop(node.arg, None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            modules.pop(node.id, None)
    replacing = {"setattr", "object", "delattr"}  # of monkeypatch, of unittest.mock.patch
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield modules.get(node.value.id, ""), node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            owner, name = node.args[:2]
            is_replaced = isinstance(node.func, ast.Name) and node.func.id == "replace"
            is_replaced |= isinstance(node.func, ast.Attribute) and node.func.attr in replacing
            if is_replaced and isinstance(owner, ast.Name) and isinstance(name, ast.Constant):
                yield modules.get(owner.id, ""), str(name.value)


@cache
def names_of(file: Path) -> set[str]:
    """Names that a file defines or imports at its top level; with those of its folder's modules."""
    found = {it.stem for it in file.parent.iterdir()} if file.stem == "__init__" else set[str]()
    nodes = [*ast.parse(file.read_text(encoding="utf-8")).body]
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {it.asname or it.name for it in node.names}
        else:
            found |= {it.id for it in ast.walk(node) if isinstance(it, ast.Name)}
            nodes += [it for it in ast.iter_child_nodes(node) if isinstance(it, ast.stmt)]
    return found


def lost_names(path: Path) -> list[str]:
    """Names that a file takes from the package, or from files beside it, and that are not there."""
    lost: list[str] = []
    for module, name in taken_names(path):
        is_ours = module.split(".")[0] == "shardeddp"
        place = (ROOT / "src" if is_ours else path.parent).joinpath(*module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py") if module else ():
            if file.is_file() and name not in names_of(file) and not name.startswith("__"):
                lost.append(f"{module}.{name}")
    return lost


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "docs"])
def test_names_that_other_programs_take_from_the_package_are_there(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    lost = {str(path.relative_to(ROOT)): found for path in files if (found := lost_names(path))}
    assert lost == {}


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "docs"])
def test_other_programs_take_no_private_names_of_the_package(folder: str) -> None:
    taken = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module, name in taken_names(path)
        if module.split(".")[0] == "shardeddp" and re.match(r"_(?!_)", name)
    ]
    assert taken == []


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("here = 1\n")
    text = """
    from beside import gone, here
    from shardeddp.comm import desync
    from shardeddp.plan.layout import FlatLayout, Lost
    desync.TRANSFER_S, desync.NOWHERE
    soon.setattr(desync, "_TRANSFER_S", 2.0)
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    assert sorted(lost_names(path)) == [
        "beside.gone",
        "shardeddp.comm.desync.NOWHERE",
        "shardeddp.comm.desync._TRANSFER_S",
        "shardeddp.plan.layout.Lost",
    ]
