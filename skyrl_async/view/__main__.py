"""Shows the samples of a run in a terminal.

uv run -m skyrl_async.view outputs/RUN --text gsm8k-17          one prompt: every sample, turn by turn
"""

import argparse
import sys
from pathlib import Path

from skyrl_async.errors import SkyRLAsyncError
from skyrl_async.view.text import group_text


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="skyrl_async.view", description="Shows the samples of a run.")
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="directory of a run, such as outputs/RUN")
    parser.add_argument("--text", required=True, metavar="UID", help="print every sample of this prompt, turn by turn")
    given = parser.parse_args(arguments)
    try:
        sys.stdout.write(group_text(given.run_dir, given.text))
    except SkyRLAsyncError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except BrokenPipeError:  # its reader, such as head, has had enough
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
