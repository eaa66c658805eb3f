"""The house rules, read from the source with `ast` and without importing the package.

A rule is a function from files to findings; `test_house.py` holds the tree to each and proves each on small sources.
"""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "shardeddp"
SRC = f"src/{PACKAGE}/"

# From the bottom up; a file is in the layer of its first folder, or of its own name.
LAYERS = (
    ("errors", "garbage", "torch_private", "translation"),
    ("plan",),
    ("comm",),
    ("tensor",),
    ("wrap",),
    ("config",),
    ("engine",),
    ("optim",),
    ("checkpoint",),
    ("report",),
    ("charts",),
    # Reads the layouts of `plan`, and the units and flat buffers of `wrap`, as the engine does; the
    # command line and Lightning's part ask it.
    ("planner",),
    ("lightning",),
    ("fabric",),
    ("cli", "migrate", "__main__"),
    ("__init__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
LIGHTNING_USERS = ("lightning/", "fabric.py")
LIGHTNING_API = f"{PACKAGE}.lightning.api"
LIGHTNING_CLASS = re.compile(rf"{re.escape(LIGHTNING_API)}\.[A-Z]\w*\.")
LIGHTNING_PRIVATE = "lightning/private.py"
LIGHTNING_IMPORTS = ("lightning/api.py", LIGHTNING_PRIVATE)

# Private attributes of objects of torch and of what builds on it; its modules show by themselves whose names are.
TORCH_PRIVATES = frozenset(
    (
        "_backward_cls",
        "_backward_hooks",
        "_base",
        "_buffers",
        "_cdata",
        "_check_input_dim",
        "_check_non_zero_input_channels",
        "_compiled_call_impl",
        "_fields",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_indices",
        "_is_param",
        "_lambda_fn",
        "_load_from_state_dict",
        "_load_state_dict_pre_hooks",
        "_module_classes",
        "_module_classes_to_ignore",
        "_modules",
        "_non_persistent_buffers_set",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
        "_parameters",
        "_pop_saved_tensors_default_hooks",
        "_post_accumulate_grad_hooks",
        "_push_saved_tensors_default_hooks",
        "_saved_tensors_hooks_disable",
        "_saved_tensors_hooks_is_enabled",
        "_schema",
        "_step_supports_amp_scaling",
        "_to_copy",
        "_top_saved_tensors_default_hooks",
        "_untyped_storage",
        "_use_count",
        "_values",
        "_version",
    )
)

TORCH_PRIVATE = "torch_private.py"

COLLECTIVE = re.compile(
    r"_?(all_gather|all_reduce|all_to_all|broadcast|gather|reduce_scatter|scatter|new_subgroups)\w*"
    r"|i?send|i?recv|(send|recv)_object_list|batch_isend_irecv|reduce|(monitored_)?barrier"
    r"|(init|destroy|abort)_process_group|new_group|split_group|init_device_mesh"
)
COLLECTIVE_HOMES = ("torch.distributed", "torch.ops.c10d", "torch.ops._c10d")
# Methods of a ProcessGroup, whatever the variable is called; the others have names that anybody may use.
GROUP_METHOD = re.compile(r"_?(allreduce|allgather|alltoall|reduce_scatter_base)\w*")
FOREIGN_ENGINE = re.compile(r"torch\.distributed\.(fsdp|_composable)")
FACTORIES = frozenset(
    [
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "scalar_tensor",
        "tensor",
        "zeros",
    ]
)
UNDER_A_DEVICE = ("planner/", "lightning/planning.py", "lightning/probe.py")
"""Makes a model's inputs and measures, under a device that it sets itself."""
MACHINE_PATH = re.compile(r"(?<![\w.}~*])/(work|root|home|Users|tmp)/\w")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place that breaks a rule; `subject` is what an excuse would name."""

    path: str
    line: int
    subject: str
    problem: str

    def __str__(self) -> str:
        """Return the finding as an editor understands it."""
        return f"{self.path}:{self.line}: {self.subject}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name as an absolute dotted path: `from . import b` in `plan/c.py` is `shardeddp.plan.b`."""

    target: str
    local_name: str
    line: int
    in_function: bool

    def is_under(self, *roots: str) -> bool:
        """Whether the name is one of the modules or lies in one of them."""
        return any(self.target == root or self.target.startswith(root + ".") for root in roots)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file; `path` is relative to the project's root and has forward slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text, self.path)

    @property
    def inner(self) -> str:
        """The path inside the package, empty for a file outside of it."""
        return self.path.removeprefix(SRC) if self.path.startswith(SRC) else ""

    @property
    def module(self) -> str:
        """The dotted name under which the file is imported."""
        return ".".join([PACKAGE, *Path(self.inner).with_suffix("").parts]).removesuffix(
            ".__init__"
        )

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every imported name, wherever the statement stands."""
        package = (
            self.module if self.inner.endswith("__init__.py") else self.module.rpartition(".")[0]
        )
        return tuple(_imports(self.tree, package))

    @cached_property
    def uses(self) -> tuple[tuple[str, int], ...]:
        """(dotted name, line) of every import and every attribute, with local names replaced by what they stand for."""
        # `import a.b` binds `a`; every other form binds the whole of what it names.
        bound = {
            i.local_name: i.local_name if i.target.startswith(i.local_name + ".") else i.target
            for i in self.imports
        }
        found = [(name.target, name.line) for name in self.imports]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                root, *rest = ast.unparse(node).split(".")
                found.append((".".join([bound.get(root, "?"), *rest]), node.lineno))
        return tuple(found)


def _imports(node: ast.AST, package: str, in_function: bool = False) -> Iterator[Import]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        prefix = ""
        if isinstance(node, ast.ImportFrom):
            parents = (
                package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            )
            prefix = ".".join([*parents, *([node.module] if node.module else [])]) + "."
        for alias in node.names:
            local = alias.asname or (alias.name if prefix else alias.name.partition(".")[0])
            yield Import(
                target=prefix + alias.name,
                local_name=local,
                line=node.lineno,
                in_function=in_function,
            )
    in_function = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, in_function)


def upward_imports(files: Sequence[Source]) -> Iterator[Finding]:
    """A file imports from its own layer or a lower one; names that are only for types count as well."""
    for file in files:
        own = Path(file.inner).parts[0].removesuffix(".py")
        if own not in RANK:
            problem = f"belongs to no layer; the layers are {', '.join(RANK)}"
            yield Finding(path=file.path, line=1, subject=own, problem=problem)
            continue
        for name in file.imports:
            if name.is_under(PACKAGE):
                # A word that is no layer is offered by the package's face: `from shardeddp import ShardedDP`.
                word = name.target.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]
                layer = word if word in RANK else "__init__"
                if RANK[layer] > RANK[own]:
                    problem = f"{own} may import from its own layer or a lower one, and {layer} lies above it"
                    yield Finding(
                        path=file.path, line=name.line, subject=name.target, problem=problem
                    )


def import_circles(files: Sequence[Source]) -> Iterator[Finding]:
    """No file imports itself through others; imports in functions and for types count, they often hide a circle."""
    paths = {file.module: file.path for file in files}
    edges: dict[str, set[str]] = {file.module: set() for file in files}
    for file in files:
        for name in file.imports:
            target = name.target if name.target in edges else name.target.rpartition(".")[0]
            edges[file.module] |= {target} & edges.keys()
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        circle: list[str] = error.args[1]
        problem = "imported by " + ", imported by ".join(circle[1:])
        yield Finding(path=paths[circle[0]], line=1, subject=circle[0], problem=problem)


def imports_in_functions(files: Sequence[Source]) -> Iterator[Finding]:
    """Imports stand at the top of the file."""
    for file in files:
        for name in file.imports:
            if name.in_function:
                problem = "imported inside a function: move it to the top of the file"
                yield Finding(path=file.path, line=name.line, subject=name.target, problem=problem)


def impure_plans(files: Sequence[Source]) -> Iterator[Finding]:
    """`plan/` is arithmetic: the standard library, itself, and the package's errors."""
    for file in files:
        for name in file.imports:
            pure = name.is_under(f"{PACKAGE}.plan", f"{PACKAGE}.errors", *sys.stdlib_module_names)
            if file.inner.startswith("plan/") and not pure:
                problem = f"plan/ imports the standard library, {PACKAGE}.plan and {PACKAGE}.errors, nothing else"
                yield Finding(path=file.path, line=name.line, subject=name.target, problem=problem)


def borrowed_privates(files: Sequence[Source]) -> Iterator[Finding]:
    """A private name of the package is used in its own file only; a class of Lightning's is not the package's."""
    for file in files:
        for dotted, line in file.uses:
            word = dotted.rpartition(".")[2]
            borrowed = dotted.startswith(PACKAGE + ".") and not LIGHTNING_CLASS.match(dotted)
            if borrowed and word.startswith("_") and not word.endswith("__"):
                problem = (
                    "private to another file: make it public there, or ask for what it answers"
                )
                yield Finding(path=file.path, line=line, subject=dotted, problem=problem)


def foreign_privates(files: Sequence[Source]) -> Iterator[Finding]:
    """A private name of Lightning is used in one file. What is neither ours nor known to be torch's counts as such."""
    definitions = {file.path: frozenset(_definitions(file.tree)) for file in files}
    everywhere = frozenset[str]().union(*definitions.values())
    for file in files:
        if file.inner == LIGHTNING_PRIVATE:
            continue
        found = [
            (i.target.rpartition(".")[2], i.line, False)
            for i in file.imports
            if i.is_under(*LIGHTNING) and i.target.rpartition(".")[2].startswith("_")
        ]
        for word, line, of_self in (*found, *_foreign_words(file)):
            ours = (everywhere if of_self else definitions[file.path]) | TORCH_PRIVATES
            if word.startswith("_") and not word.endswith("_") and word not in ours:
                problem = f"private to Lightning, it seems: {LIGHTNING_PRIVATE} gives it a plain name and checks it"
                yield Finding(path=file.path, line=line, subject=word, problem=problem)


def _definitions(tree: ast.Module) -> Iterator[str]:
    """Names that a file gives to functions, classes, fields and attributes."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case ast.Attribute(
                attr=name, ctx=ast.Store(), value=ast.Name("self" | "cls" | "made" | "other")
            ):
                yield name
            case ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]):
                yield name
            case ast.Call(
                func=ast.Attribute(
                    attr="update", value=ast.Call(ast.Name("vars"), [ast.Name("self")])
                )
            ):
                yield from (word.arg for word in node.keywords if word.arg)
            case _:
                pass


def _foreign_words(file: Source) -> Iterator[tuple[str, int, bool]]:
    """(name, line, whether it is an object's own) of every attribute that is used, also as a text."""
    foreign = {i.local_name for i in file.imports if not i.is_under(PACKAGE, *LIGHTNING)}
    for node in ast.walk(file.tree):
        match node:
            case ast.Attribute(value=owner, attr=word):
                pass
            case ast.Subscript(value=owner, slice=ast.Constant(str(word))):
                pass
            case ast.Call(
                ast.Name("getattr" | "setattr" | "delattr"), [owner, ast.Constant(str(word)), *_]
            ):
                pass
            case ast.Call(
                ast.Attribute(owner, "get" | "pop" | "setdefault"), [ast.Constant(str(word)), *_]
            ):
                pass
            case ast.Compare(ast.Constant(str(word)), [ast.In() | ast.NotIn()], [owner]):
                pass
            case ast.Call(
                ast.Attribute(ast.Call(ast.Name("vars"), [owner]), "update"), keywords=words
            ):
                own = ast.unparse(owner) == "self"
                yield from ((word.arg, node.lineno, own) for word in words if word.arg)
                continue
            case _:
                continue
        text = ast.unparse(owner)
        if text.partition(".")[0] not in foreign:
            yield word, node.lineno, text in ("self", "cls", "super()", "vars(self)")


def stray_torch_privates(files: Sequence[Source]) -> Iterator[Finding]:
    """A private name of torch is used in one file; those of its objects are listed above."""
    for file in files:
        for dotted, line in file.uses if file.inner != TORCH_PRIVATE else ():
            words = dotted.split(".")
            private = any(word.startswith("_") and not word.endswith("_") for word in words[1:])
            if (
                re.fullmatch(r"torch(\.\w+)+", dotted)
                and words[1] != "ops"
                and private
                and words[-1] not in TORCH_PRIVATES
            ):
                problem = (
                    f"private to torch: {TORCH_PRIVATE} gives it a plain name and looks for it"
                )
                yield Finding(path=file.path, line=line, subject=dotted, problem=problem)


def stray_collectives(files: Sequence[Source]) -> Iterator[Finding]:
    """Collectives are issued, and process groups made, in `comm/`; a mention counts as much as a call."""
    for file in files:
        for dotted, line in file.uses if not file.inner.startswith("comm/") else ():
            home, _, word = dotted.rpartition(".")
            if GROUP_METHOD.fullmatch(word) or (
                home.startswith(COLLECTIVE_HOMES) and COLLECTIVE.fullmatch(word)
            ):
                problem = "collectives and process groups belong to comm/"
                yield Finding(path=file.path, line=line, subject=word, problem=problem)


def foreign_engines(files: Sequence[Source]) -> Iterator[Finding]:
    """The sharding engines of torch appear nowhere, neither in the text nor under another spelling."""
    for file in files:
        written = [(text, line) for line, text in enumerate(file.text.splitlines(), start=1)]
        for text, line in {
            (found.group(), line)
            for text, line in [*written, *file.uses]
            if (found := FOREIGN_ENGINE.search(text))
        }:
            yield Finding(
                path=file.path, line=line, subject=text, problem="the sharding engine is our own"
            )


def stray_lightning(files: Sequence[Source]) -> Iterator[Finding]:
    """Lightning is known to one package, which has it from two files.

    ``lightning_utilities`` is a library of functions on collections, without Lightning in it.
    """
    for file in files:
        for name in file.imports if file.inner not in LIGHTNING_IMPORTS else ():
            problem = ""
            if name.is_under(*LIGHTNING):
                problem = f"both namespaces have to work: import it from {LIGHTNING_API}"
            elif name.is_under(LIGHTNING_API) and not file.inner.startswith(LIGHTNING_USERS):
                problem = f"Lightning is known only to {' and '.join(LIGHTNING_USERS)}"
            if problem:
                yield Finding(path=file.path, line=name.line, subject=name.target, problem=problem)


def missing_docstrings(files: Sequence[Source]) -> Iterator[Finding]:
    """Every file starts by saying what it is."""
    for file in files:
        if not ast.get_docstring(file.tree):
            yield Finding(
                path=file.path,
                line=1,
                subject="docstring",
                problem="the file does not say what it is",
            )


def missing_annotations(files: Sequence[Source]) -> Iterator[Finding]:
    """Every argument and every result has a type; `self` and `cls` of a method have one already."""
    for file in files:
        methods = [
            item
            for node in ast.walk(file.tree)
            if isinstance(node, ast.ClassDef)
            for item in node.body
        ]
        for node in ast.walk(file.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                static = any(
                    ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list
                )
                given = [*node.args.posonlyargs, *node.args.args]
                given = given[1:] if node in methods and not static else given
                given += [
                    arg for arg in (*node.args.kwonlyargs, node.args.vararg, node.args.kwarg) if arg
                ]
                bare = [arg.arg for arg in given if not arg.annotation] + (
                    [] if node.returns else ["the result"]
                )
                if bare:
                    problem = f"without a type: {', '.join(bare)}"
                    yield Finding(
                        path=file.path, line=node.lineno, subject=node.name, problem=problem
                    )


def unknown_arguments(files: Sequence[Source]) -> Iterator[Finding]:
    """Every name under `Args:` is a parameter of the function, or of the constructor of the class."""
    classes = _classes(files)
    for file in files:
        for node in ast.walk(file.tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            is_class = isinstance(node, ast.ClassDef)
            known = _constructed_with(node, classes) if is_class else _parameters(node)
            described = _described(ast.get_docstring(node) or "")
            for name in described:
                if name not in known:
                    problem = f"describes {name}, which is no parameter"
                    yield Finding(
                        path=file.path, line=node.lineno, subject=node.name, problem=problem
                    )


def _described(docstring: str) -> list[str]:
    """Names under `Args:`; their descriptions are indented further."""
    section = re.split(r"^Args:\n", docstring, maxsplit=1, flags=re.MULTILINE)[1:]
    lines = "".join(section).splitlines()
    end = next((at for at, line in enumerate(lines) if line and line[0] != " "), len(lines))
    found = (re.match(r" {4}((?:\*{0,2}\w+(?:, )?)+):", line) for line in lines[:end])
    return [name.strip("* ") for names in found if names for name in names[1].split(",")]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return [arg.arg for arg in every if arg]


def _constructed_with(
    node: ast.ClassDef, classes: Mapping[str, tuple[Source, ast.ClassDef]]
) -> list[str]:
    """Fields of a dataclass and of those that it extends, or parameters of the nearest constructor."""
    found: list[str] = []
    for each in (node, *_bases(node, classes)):
        is_dataclass = any("dataclass" in ast.unparse(it) for it in each.decorator_list)
        for item in each.body:
            if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__new__"):
                return [*found, *_parameters(item)]
            if isinstance(item, ast.AnnAssign) and is_dataclass:
                found.append(ast.unparse(item.target))
    return found


def concrete_overrides(files: Sequence[Source]) -> Iterator[Finding]:
    """No method with a body replaces another one of ours: a reader would have to know which of them runs."""
    classes = _classes(files)
    for file, node in classes.values():
        above = {method for base in _bases(node, classes) for method in _concrete(base)}
        for method in sorted(above & set(_concrete(node))):
            problem = "a method of ours replaces another one: make that abstract, or give one class the other as a part"
            yield Finding(
                path=file.path, line=node.lineno, subject=f"{node.name}.{method}", problem=problem
            )


def _classes(files: Sequence[Source]) -> dict[str, tuple[Source, ast.ClassDef]]:
    return {
        node.name: (file, node)
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
    }


def _bases(
    node: ast.ClassDef, classes: Mapping[str, tuple[Source, ast.ClassDef]]
) -> Iterator[ast.ClassDef]:
    for name in (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases):
        if name in classes:
            yield classes[name][1]
            yield from _bases(classes[name][1], classes)


def _concrete(node: ast.ClassDef) -> Iterator[str]:
    """Names of the methods with a body; constructors call each other."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name != "__init__":
            body = [
                line
                for line in item.body
                if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
            if body and not any(
                "abstract" in ast.unparse(decorator) for decorator in item.decorator_list
            ):
                yield item.name


def state_by_hasattr(files: Sequence[Source]) -> Iterator[Finding]:
    """State is declared: no `hasattr`, `getattr` with a default or `vars` finds it, in oneself or by a private name."""
    for file in files:
        for node in ast.walk(file.tree):
            match node:
                case ast.Call(func=ast.Name("hasattr"), args=[owner, name]):
                    pass
                case ast.Call(func=ast.Name("getattr"), args=[owner, name, _]):
                    pass
                case ast.Compare(
                    name, [ast.In() | ast.NotIn()], [ast.Attribute(owner, "__dict__")]
                ):
                    pass
                case ast.Compare(
                    name, [ast.In() | ast.NotIn()], [ast.Call(ast.Name("vars"), [owner])]
                ):
                    pass
                case ast.Call(
                    ast.Attribute(ast.Call(ast.Name("vars"), [owner]), "get"), [name, *_]
                ):
                    pass
                case _:
                    continue
            word = str(name.value) if isinstance(name, ast.Constant) else ""
            private = (
                word.startswith("_") and not word.endswith("__") and word not in TORCH_PRIVATES
            )
            if (file.inner != LIGHTNING_PRIVATE and private) or ast.unparse(owner) in (
                "self",
                "cls",
            ):
                problem = "state is declared in __init__ or in a dataclass, not discovered"
                yield Finding(
                    path=file.path, line=node.lineno, subject=ast.unparse(node), problem=problem
                )


def default_devices(files: Sequence[Source]) -> Iterator[Finding]:
    """Tensors name their device: users may have set another default one, which host messages cannot travel from."""
    for file in files:
        if file.inner.startswith(UNDER_A_DEVICE):
            continue
        for node in ast.walk(file.tree):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).removeprefix("torch.") in FACTORIES
                and ast.unparse(node.func).startswith("torch.")
                and not any(given.arg in ("device", None) for given in node.keywords)
            ):
                problem = "a tensor on whatever device is the default: say device="
                yield Finding(
                    path=file.path, line=node.lineno, subject=ast.unparse(node), problem=problem
                )


def machine_paths(files: Sequence[Source]) -> Iterator[Finding]:
    """Nothing that is tracked knows where somebody keeps it."""
    for file in files:
        for line, text in enumerate(file.text.splitlines(), start=1):
            if found := MACHINE_PATH.search(text):
                problem = "a path of one machine: write it relative to the project"
                yield Finding(path=file.path, line=line, subject=found.group(), problem=problem)
