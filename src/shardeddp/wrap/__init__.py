"""Wrap policies: from a module tree to units, the parameters that are gathered together."""

from shardeddp.wrap.policy import AutoPolicy as AutoPolicy
from shardeddp.wrap.policy import ClassPolicy as ClassPolicy
from shardeddp.wrap.policy import Modules as Modules
from shardeddp.wrap.policy import NamePolicy as NamePolicy
from shardeddp.wrap.policy import Policy as Policy
from shardeddp.wrap.policy import PolicyLike as PolicyLike
from shardeddp.wrap.policy import PredicatePolicy as PredicatePolicy
from shardeddp.wrap.policy import SingleUnitPolicy as SingleUnitPolicy
from shardeddp.wrap.policy import SizePolicy as SizePolicy
from shardeddp.wrap.policy import resolve_policy as resolve_policy
from shardeddp.wrap.units import build_units as build_units
from shardeddp.wrap.units import require_parameters as require_parameters
