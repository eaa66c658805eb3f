"""What is said of a checkpoint is short, in words, and in whole lines."""

from pathlib import Path

from shardeddp.checkpoint.full_read import Damage
from shardeddp.checkpoint.verify import Verification
from shardeddp.plan.layout import Interval
from shardeddp.report import MAX_DAMAGES, verification_view

PATH = Path("runs/[bold]/step=7.ckpt")


def found(count: int, unchecked: int = 0) -> Verification:
    where = [Interval(1000 * number, 1000 * number + 500) for number in range(count)]
    damages = [
        Damage(file="__0_0.distcp", tensor="w", where=it, expected="aa", found="bb") for it in where
    ]
    names = [f"model.{number}" for number in range(unchecked)]
    return Verification(path=PATH, step=7, nbytes=3 * 2**30, damages=damages, unchecked=names)


def test_a_good_checkpoint_is_one_line() -> None:
    assert verification_view(found(0), 1.5) == [f"good     {PATH} (3.00 GiB in 1.5 s, step 7)"]


def test_each_damage_is_a_line() -> None:
    head, first, second = verification_view(found(2), 1.5)
    assert head == f"DAMAGED  {PATH} (2 places, step 7)"
    assert first == "  __0_0.distcp bytes 0 to 500 of w: expected aa, found bb"
    assert second == "  __0_0.distcp bytes 1,000 to 1,500 of w: expected aa, found bb"


def test_many_damages_are_counted() -> None:
    shown = verification_view(found(MAX_DAMAGES + 5), 1.5)
    assert len(shown) == MAX_DAMAGES + 2
    assert shown[-1] == "  and 5 more; --json has them all"


def test_what_could_not_be_checked_is_said() -> None:
    text = (
        "  not checked, for it was written without a checksum: model.0, model.1, model.2 and 6 more"
    )
    assert verification_view(found(0, unchecked=9), 1.5)[1] == text
