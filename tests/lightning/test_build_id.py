"""Ranks whose installed files differ run other releases, whatever version they say."""

import shutil
import time
from pathlib import Path

from shardeddp.lightning.run_group import describe_release, digest_of_code


def test_a_digest_of_code_is_that_of_its_files_wherever_they_are(tmp_path: Path) -> None:
    package = tmp_path / "here"
    (package / "comm").mkdir(parents=True)
    (package / "comm" / "mesh.py").write_text("SIZE = 1\n")
    found = digest_of_code(package)
    shutil.copytree(package, tmp_path / "there")
    assert digest_of_code(tmp_path / "there") == found
    (package / "comm" / "mesh.py").write_text("SIZE = 2\n")
    assert digest_of_code(package) != found
    (tmp_path / "there" / "comm" / "mesh.py").rename(tmp_path / "there" / "mesh.py")
    assert digest_of_code(tmp_path / "there") != found


def test_looking_at_all_files_of_the_package_takes_no_time_that_anybody_notices() -> None:
    began = time.process_time()
    describe_release()
    assert time.process_time() - began < 0.05
