"""The wrong tag of an installed wheel is corrected once, and only that line."""

import sys
from pathlib import Path

import pytest

from skyrl_async.config.wheel_tag import correct_wheel_tag

HERE = f"cp{sys.version_info.major}{sys.version_info.minor}"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution ``wrongly-tagged``, with its WHEEL file hard-linked from a cache as uv does."""
    directory = tmp_path / "site" / "wrongly_tagged-1.0.dist-info"
    directory.mkdir(parents=True)
    cached = tmp_path / "cached-WHEEL"
    cached.write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp39-cp39-linux_x86_64\n\n")
    (directory / "WHEEL").hardlink_to(cached)
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: wrongly-tagged\nVersion: 1.0\n")
    (directory / "RECORD").write_text("wrongly_tagged-1.0.dist-info/WHEEL,,\nwrongly_tagged-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return directory / "WHEEL"


def test_a_wrong_tag_becomes_that_of_the_interpreter_and_stays_so(installed: Path) -> None:
    assert correct_wheel_tag("wrongly-tagged")
    text = installed.read_text()
    assert text == f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {HERE}-{HERE}-linux_x86_64\n\n"
    assert not correct_wheel_tag("wrongly-tagged")


def test_the_package_managers_cached_copy_is_left_as_it_was(installed: Path, tmp_path: Path) -> None:
    correct_wheel_tag("wrongly-tagged")
    assert "cp39-cp39" in (tmp_path / "cached-WHEEL").read_text()


def test_an_absent_distribution_is_no_error() -> None:
    assert not correct_wheel_tag("no-such-distribution")
