"""Harbor's task directories as prompts, and Dockerfiles that are followed without an image."""

import tarfile
from pathlib import Path

import pytest

from examples.harbor.make import tasks, write
from skyrl_async.errors import DatasetError
from skyrl_async.harbor.runner.dockerfile import CannotBuildError, Copy, Run, Step, steps
from skyrl_async.harbor.runner.sandbox import ENVIRONMENT
from skyrl_async.harbor.tasks import TASK_COLUMN, load_tasks


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for task in list(tasks())[:3]:
        write(task, tmp_path / "tasks")
    return tmp_path / "tasks"


def test_each_directory_of_a_task_is_a_prompt_with_its_instruction(directory: Path) -> None:
    prompts = load_tasks(directory, "task.harbor.path")
    assert [prompt.uid for prompt in prompts] == ["visitors-0", "visitors-1", "visitors-2"]
    (message,) = prompts[0].messages
    assert message["role"] == "user" and message["content"].startswith("The file /app/access.log")
    assert Path(prompts[0].extras[TASK_COLUMN]) == directory / "visitors-0"
    (alone,) = load_tasks(directory / "visitors-1", "task.harbor.path")
    assert alone.uid == "visitors-1"


@pytest.mark.parametrize(("launch_dir", "name"), [("visitors-1", "."), ("visitors-1/tests", "..")])
def test_a_task_around_the_launch_directory_has_its_own_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch, launch_dir: str, name: str
) -> None:
    monkeypatch.chdir(directory / launch_dir)
    (alone,) = load_tasks(Path(name), "task.harbor.path")
    assert alone.uid == "visitors-1"


def test_all_tasks_that_cannot_be_used_are_named_at_once(directory: Path) -> None:
    (directory / "visitors-0/tests/test.sh").unlink()
    (directory / "visitors-1/instruction.md").write_text(" \n")
    (directory / "visitors-2/task.toml").write_text("[agent\n")
    with pytest.raises(DatasetError) as raised:
        load_tasks(directory, "task.harbor.path")
    said = str(raised.value)
    assert "3 of 3 Harbor tasks of task.harbor.path" in said
    assert "visitors-0: it has no verifier: tests/test.sh" in said
    assert "visitors-1: instruction.md is empty" in said
    assert "visitors-2: " in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[steps]]\ndays = 1\n", r"steps of task\.toml must be tables with a name"),
        ("steps = 3\n", r"steps of task\.toml must be tables with a name"),
        ("environment = 'docker'\n", r"environment of task\.toml must be a table"),
    ],
)
def test_a_field_of_another_form_is_named_with_its_task(directory: Path, text: str, expected: str) -> None:
    (directory / "visitors-1/task.toml").write_text(text)
    with pytest.raises(DatasetError, match=f"visitors-1: {expected}"):
        load_tasks(directory, "task.harbor.path")


def test_a_task_file_among_the_files_of_a_task_is_no_task(directory: Path) -> None:
    (directory / "visitors-0/environment/files/task.toml").write_text("[tool]\n")
    assert len(load_tasks(directory, "task.harbor.path")) == 3


def test_links_to_tasks_are_followed_and_never_in_circles(directory: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    (chosen / "easy").mkdir(parents=True)
    (chosen / "first").symlink_to(directory / "visitors-1")
    (chosen / "easy/second").symlink_to("../../tasks/visitors-0")
    (chosen / "easy/back").symlink_to(chosen)
    (directory / "elsewhere").symlink_to(chosen)
    prompts = load_tasks(chosen, "task.harbor.path")
    assert [prompt.uid for prompt in prompts] == ["easy/second", "first"]
    uids = [prompt.uid for prompt in load_tasks(directory, "task.harbor.path")]
    assert uids == ["elsewhere/easy/second", "elsewhere/first", "visitors-0", "visitors-1", "visitors-2"]


@pytest.mark.parametrize(("name", "expected"), [("nowhere", "which is none"), ("", "no task.toml is below")])
def test_a_directory_without_tasks_is_refused(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(DatasetError, match=rf"task.harbor.eval_path .*{expected}"):
        load_tasks(tmp_path / name, "task.harbor.eval_path")


def followed(context: Path, text: str) -> list[Step]:
    (context / "Dockerfile").write_text(text)
    return list(steps(context / "Dockerfile"))


def test_a_dockerfile_is_followed_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").touch()
    (tmp_path / "note.txt").touch()
    copied, ran, copied_into, last = followed(
        tmp_path,
        "# a comment\nFROM debian:12 AS base\nARG WHO=me\nENV GREETING=hello NAME=${WHO}\nWORKDIR /app\n"
        'COPY src src/\nRUN echo $GREETING && \\\n    # another\n    touch done\nCOPY ["note.txt", "/etc/"]\n'
        'USER agent\nCMD ["bash"]\n',
    )
    assert copied.action == Copy(sources=(tmp_path / "src",), target="/app/src/")
    assert ran.action == Run(argv=("/bin/sh", "-c", "echo $GREETING && touch done"))
    assert ran.workdir == "/app" and ran.env == {"GREETING": "hello", "NAME": "me", "WHO": "me"}
    assert copied_into.action == Copy(sources=(tmp_path / "note.txt",), target="/etc/")
    assert last.action is None and last.env == {"GREETING": "hello", "NAME": "me"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("FROM alpine", "begins a second stage"),
        ("COPY --from=build /a /b", "needs another image"),
        ("ADD https://example.org/x /x", "needs another image or a network"),
        ("COPY missing /x", "names files that are not in"),
        ("COPY ../../etc/passwd /x", "names files that are not in"),
        ("FETCH it", "cannot be read"),
        ("COPY", "must name files and where they go"),
        ("COPY Dockerfile", "must name files and where they go"),
        ("COPY --chmod=u+x Dockerfile /x", "cannot be read: invalid literal"),
        ("ENV NAME='me", "cannot be read: No closing quotation"),
        ("SHELL bash", "cannot be read"),
        ("COPY <<EOF /x", "has a file in a here document"),
        ("RUN --mount=type=bind,source=src,target=/src make", "needs a mount of files"),
    ],
)
def test_a_line_that_needs_an_image_or_a_network_is_named(tmp_path: Path, line: str, expected: str) -> None:
    with pytest.raises(CannotBuildError, match=expected) as raised:
        followed(tmp_path, f"FROM debian:12\n{line}\n")
    assert repr(line) in str(raised.value)


def test_an_archive_that_add_would_unpack_is_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "files.tar.gz", "w:gz"):
        pass
    copied, _ = followed(tmp_path, "FROM debian:12\nCOPY files.tar.gz /app/\n")
    assert copied.action == Copy(sources=(tmp_path / "files.tar.gz",), target="/app/")
    with pytest.raises(CannotBuildError, match="'ADD files.tar.gz /app/' unpacks an archive"):
        followed(tmp_path, "FROM debian:12\nADD files.tar.gz /app/\n")


@pytest.mark.parametrize("source", [".", "./", "/"])
def test_the_whole_context_is_copied(tmp_path: Path, source: str) -> None:
    copied, _ = followed(tmp_path, f"FROM debian:12\nCOPY {source} /app\n")
    assert copied.action == Copy(sources=(tmp_path,), target="/app/")


def test_what_is_copied_has_the_mode_that_its_line_says(tmp_path: Path) -> None:
    (tmp_path / "tool").touch()
    copied, _ = followed(tmp_path, "FROM debian:12\nCOPY --chmod=755 --chown=agent tool /usr/local/bin/\n")
    assert copied.action == Copy(sources=(tmp_path / "tool",), target="/usr/local/bin/", mode=0o755)


def test_a_path_is_added_to_the_sandboxs_own(tmp_path: Path) -> None:
    (last,) = followed(tmp_path, 'FROM debian:12\nENV PATH="$HOME/bin:${PATH}"\n')
    assert last.env == {"PATH": f"/root/bin:{ENVIRONMENT['PATH']}"}


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("RUN --mount=type=cache,target=/root/.cache --network=none make all", "make all"),
        ("RUN make && \\\n\n    make install", "make && make install"),
        ("RUN [ -f done ] || make", "[ -f done ] || make"),
        (
            "RUN cat <<'EOF' > a && \\\n    touch b\n# kept\n\n  $x \\\nEOF",
            "cat <<'EOF' > a && touch b\n# kept\n\n  $x \\\nEOF",
        ),
        ("RUN <<EOF\nset -e\ntouch done\nEOF", "set -e\ntouch done"),
        ("RUN cat <<< word; echo $((1<<n))", "cat <<< word; echo $((1<<n))"),
    ],
    ids=["flags", "an empty line", "a test", "a here document", "a script", "no here document"],
)
def test_a_command_is_what_the_shell_would_run(tmp_path: Path, line: str, command: str) -> None:
    ran, _ = followed(tmp_path, f"FROM debian:12\n{line}\n")
    assert ran.action == Run(argv=("/bin/sh", "-c", command))
