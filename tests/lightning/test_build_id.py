"""Ranks whose installed files differ run other releases, whatever version they say."""

import shutil
import time
from pathlib import Path

from shardeddp.lightning.run_group import describe_release


def test_a_release_is_its_files_wherever_they_are(tmp_path: Path) -> None:
    package = tmp_path / "here"
    (package / "comm").mkdir(parents=True)
    (package / "comm" / "mesh.py").write_text("SIZE = 1\n")
    release = describe_release(package)
    shutil.copytree(package, tmp_path / "there")
    assert describe_release(tmp_path / "there") == release
    (package / "comm" / "mesh.py").write_text("SIZE = 2\n")
    assert describe_release(package) != release
    (tmp_path / "there" / "comm" / "mesh.py").rename(tmp_path / "there" / "mesh.py")
    assert describe_release(tmp_path / "there") != release


def test_looking_at_all_files_of_the_package_takes_no_time_that_anybody_notices() -> None:
    began = time.process_time()
    describe_release()
    assert time.process_time() - began < 0.05
