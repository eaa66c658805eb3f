"""The policy ``"auto"``: finds the repeated blocks of a model."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.sharding.spec import join
from shardeddp.wrap.policy import Policy
from shardeddp.wrap.tree import class_of, has_forward, unit_children, walk

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# An embedding's weight is often read outside its forward (tied logits); the root's parameters are there all the time.
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

# 64 KiB in fp32: a smaller all-gather costs its latency, whatever its size.
_SMALLEST_FLOOR = 16_384
_LARGEST_FLOOR = 1_000_000
_FLOOR_FRACTION = 256


def default_floor(numel: int) -> int:
    """The fewest parameters that ``"auto"`` lets a unit have in a model of ``numel`` parameters.

    Example:
        The 1/256 is for models between 4 and 256 million parameters; the ends are fixed::

            model     2 M   25 M   124 M   7 B
            floor    16 k   98 k   484 k   1 M
    """
    return min(_LARGEST_FLOOR, max(_SMALLEST_FLOOR, numel // _FLOOR_FRACTION))


class AutoPolicy(Policy):
    """Makes a unit of each repeated block of the model.

    The rule, in which a *list* is an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` (or a subclass of one):

    1. A *block* is a module held directly in a list, with a forward and at least ``min_numel`` parameters, if a second
       such module of the same class exists anywhere in the model. One object that is registered twice counts once.
       ``nn.Embedding`` is never a block.
    2. The outermost blocks become units: the layers of a transformer, not the experts or the heads inside them.
    3. A *stage* is opened: the blocks inside it are taken in its place. A block is a stage if at least half of its
       parameters are in list-held blocks of one class, each made of several modules, and if stages come in different
       sizes: no two blocks of its class, or fewer than half of them, have the same number of parameters. So Swin gives
       its blocks and not its stages. A plain ``nn.Sequential`` of equal blocks is a stage at any size.
    4. A block with more than ``max_fraction`` of the model's parameters is opened too: the blocks inside it become
       units, and so does each of its other children that reaches ``min_numel``. If there are none, it is a unit.
    5. All else belongs to the unit around it, mostly the root: embeddings, heads, classes that appear once, models
       without lists, models of which every part is below ``min_numel``.

    Args:
        min_numel: Parameters (elements) that a unit holds at least; None: 1/256 of the model's, but not below 16,384
            and not above 1,000,000.
        max_fraction: Share of the model's parameters above which a block is opened, in (0, 1].
    """

    def __init__(self, min_numel: int | None = None, max_fraction: float = 0.5) -> None:
        if min_numel is not None and min_numel < 1:
            raise ConfigurationError(
                f"AutoPolicy: expected min_numel of at least 1 parameter or None, found {min_numel}."
            )
        if not 0 < max_fraction <= 1:
            raise ConfigurationError(f"AutoPolicy: expected max_fraction above 0 and at most 1, found {max_fraction}.")
        self.min_numel = min_numel
        self.max_fraction = max_fraction

    def select(self, root: nn.Module) -> list[str]:
        """The blocks of the model by the rule above; none where it has no repeated blocks."""
        numel = sum(parameter.numel() for parameter in root.parameters())
        floor = default_floor(numel) if self.min_numel is None else self.min_numel
        return _Census(root, floor, self.max_fraction * numel).units()


class _Census:
    """The parameters of every module and the classes of list members, counted once for one ``select``."""

    def __init__(self, root: nn.Module, floor: int, ceiling: float) -> None:
        self._root = root
        self._floor = floor
        self._ceiling = ceiling
        self._numel = {id(module): _numel(module) for module in root.modules()}
        self._members: dict[int, nn.Module] = {
            id(child): child
            for _, module in walk(root)
            if isinstance(module, _LISTS)
            for _, child in unit_children(module)
            if has_forward(child) and self._is_eligible(child)
        }
        self._sizes: defaultdict[type[nn.Module], list[int]] = defaultdict(list)
        for member in self._members.values():
            self._sizes[class_of(member)].append(self._numel[id(member)])

    def units(self) -> list[str]:
        """Names of the chosen modules, each object once."""
        modules = dict(self._root.named_modules(remove_duplicate=False))
        first_name: dict[int, str] = {}
        for name in self._find("", self._root):
            first_name.setdefault(id(modules[name]), name)
        return list(first_name.values())

    def _find(self, name: str, module: nn.Module) -> list[str]:
        """The units at or below a module, outermost only."""
        if not self._is_eligible(module):
            return []
        if self._is_block(module) and not self._is_stage(module):
            return [name] if self._numel[id(module)] <= self._ceiling else self._split(name, module)
        return [
            unit for child_name, child in unit_children(module) for unit in self._find(join(name, child_name), child)
        ]

    def _split(self, name: str, module: nn.Module) -> list[str]:
        """The units of a module that is too large to be one: every eligible child, or the units inside it."""
        units: list[str] = []
        for child_name, child in unit_children(module):
            path = join(name, child_name)
            inside = self._find(path, child)
            if inside or not self._is_eligible(child):
                units += inside
            elif has_forward(child) and self._numel[id(child)] <= self._ceiling:
                units.append(path)
            else:
                units += self._split(path, child)
        return units or ([name] if has_forward(module) else [])

    def _is_eligible(self, module: nn.Module) -> bool:
        return self._numel[id(module)] >= self._floor and not isinstance(module, _EMBEDDINGS)

    def _is_block(self, module: nn.Module) -> bool:
        return id(module) in self._members and len(self._sizes[class_of(module)]) > 1

    def _is_stage(self, module: nn.Module) -> bool:
        """Whether the module is one of several sizes and made of blocks, or a plain sequence of equal blocks."""
        sizes_differ = not _mostly_equal(self._sizes[class_of(module)])
        if not sizes_differ and class_of(module) is not nn.Sequential:
            return False
        by_class: defaultdict[type[nn.Module], list[nn.Module]] = defaultdict(list)
        for inner in self._composites_in(module):
            by_class[class_of(inner)].append(inner)
        return any(
            len(blocks) > 1
            and 2 * _numel(*blocks) >= self._numel[id(module)]
            and (sizes_differ or _mostly_equal([self._numel[id(block)] for block in blocks]))
            for blocks in by_class.values()
        )

    def _composites_in(self, module: nn.Module) -> Iterator[nn.Module]:
        """The list members inside a module that consist of modules themselves: blocks, not single layers."""
        for name, inner in walk(module):
            if name and id(inner) in self._members and any(True for _ in unit_children(inner)):
                yield inner


def _numel(*modules: nn.Module) -> int:
    """Elements of the parameters of the modules together, each parameter once."""
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in parameters.values())


def _mostly_equal(sizes: list[int]) -> bool:
    """Whether two or more, and at least half, are of one size."""
    most = max(Counter(sizes).values())
    return most > 1 and 2 * most >= len(sizes)
