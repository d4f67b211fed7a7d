"""Shows runs: a page in the browser, one prompt in the terminal, or a report in one file.

uv run -m skyrl_async.view outputs/RUN                          a page, live while the run goes on
uv run -m skyrl_async.view outputs/RUN outputs/OTHER            several runs over each other
uv run -m skyrl_async.view --demo                               a recorded run
uv run -m skyrl_async.view outputs/RUN --export report.html     one file to send, which needs no network
uv run -m skyrl_async.view outputs/RUN --text gsm8k-17          every sample of a prompt, turn by turn, in the terminal
"""

import argparse
import os
import sys
import threading
import webbrowser
from pathlib import Path

from skyrl_async.errors import ConfigError, SkyRLAsyncError
from skyrl_async.view.run import ViewedRun
from skyrl_async.view.text import group_text

DEMO = Path(__file__).with_name("demo")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="skyrl_async.view", description="Shows what runs have recorded.")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="directory of a run, such as outputs/RUN")
    parser.add_argument("--demo", action="store_true", help="show a recorded run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--text", metavar="UID", help="print every sample of this prompt, turn by turn")
    what.add_argument("--export", type=Path, metavar="FILE", help="write a report in one HTML file")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on; others than loopback want a token")
    parser.add_argument("--port", type=int, default=8265, help="port to serve on; 0: any free one")
    parser.add_argument(
        "--no-browser", action="store_true", help="open no browser; without a screen none is opened anyway"
    )
    given = parser.parse_args(arguments)
    try:
        _show(given)
    except SkyRLAsyncError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except BrokenPipeError:  # its reader, such as head, has had enough
        sys.stderr.close()
    except KeyboardInterrupt:
        pass
    return 0


def _show(given: argparse.Namespace) -> None:
    directories = [*given.runs, *([DEMO] if given.demo else [])]
    if not directories:
        raise ConfigError("name the directory of a run, such as outputs/RUN, or --demo")
    runs = [ViewedRun(directory) for directory in directories]
    if given.text is not None:
        problems: list[str] = []
        for directory in directories:
            try:
                sys.stdout.write(group_text(directory, given.text))
            except SkyRLAsyncError as error:
                problems.append(str(error))
        if len(problems) == len(directories):
            raise ConfigError("\n".join(problems))
        sys.stderr.writelines(f"{problem}\n" for problem in problems)
        return
    if given.export is not None:
        from skyrl_async.view.report import write_report

        num_bytes, problems = write_report(runs, given.export)
        sys.stderr.writelines(f"{problem}\n" for problem in problems)
        sys.stdout.write(f"{given.export} ({num_bytes / 1e6:.1f} MB)\n")
        return
    from skyrl_async.view.server import serve

    def say(address: str) -> None:
        sys.stdout.write(f"{address}  (Ctrl+C ends it)\n")
        sys.stdout.flush()
        # Without a screen a browser of the terminal would take it. In a thread, since the call of some browsers ends with them.
        has_screen = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
        if has_screen and not given.no_browser:
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()

    serve(runs, host=given.host, port=given.port, say=say)


if __name__ == "__main__":
    sys.exit(main())
