"""Datasets: every row becomes one prompt, or one error that names its file and line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.data.dataset import filter_long_prompts, load_sources
from skyrl_async.errors import DatasetError
from skyrl_async.types import Prompt


def load_prompts(files: list[Path], env_class: str | None, **options: Any) -> list[Prompt]:
    return [prompt for prompts in load_sources(files, env_class, **options) for prompt in prompts]


def write_rows(file: Path, *rows: Any) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_a_row_in_skyrl_form_becomes_a_prompt_with_its_other_columns_as_extras(tmp_path: Path) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "max_turns": 3},
    }
    (prompt,) = load_prompts([write_rows(tmp_path / "a.jsonl", row)], None)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert prompt.env_class == "gsm8k"
    assert prompt.extras["reward_spec"]["ground_truth"] == "2"
    assert prompt.extras["data_source"] == "gsm8k"
    assert prompt.extras["max_turns"] == 3
    assert prompt.extras["extra_info"] == {"split": "train", "max_turns": 3}


def test_a_string_is_one_user_message_and_the_default_environment_fills_in(tmp_path: Path) -> None:
    (prompt,) = load_prompts([write_rows(tmp_path / "a.jsonl", {"uid": 7, "prompt": "Hi"})], "relay")
    assert prompt == Prompt(uid="7", messages=({"role": "user", "content": "Hi"},), env_class="relay")


def test_a_uid_made_from_content_does_not_depend_on_place_or_on_the_order_of_columns(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", {"prompt": "x", "k": 1}, {"prompt": "y", "k": 1})
    second = write_rows(tmp_path / "b.jsonl", {"k": 1, "prompt": "y"})
    assert load_prompts([first], "relay")[1].uid == load_prompts([second], "relay")[0].uid


def test_files_are_read_in_order_and_empty_lines_skipped(tmp_path: Path) -> None:
    files = [
        write_rows(tmp_path / "b.jsonl", {"uid": "1", "prompt": "x"}, "", {"uid": "2", "prompt": "x"}),
        write_rows(tmp_path / "a.jsonl", {"uid": "3", "prompt": "x"}),
    ]
    assert [prompt.uid for prompt in load_prompts(files, "relay")] == ["1", "2", "3"]


def test_two_rows_with_one_uid_are_named_with_both_lines(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", {"uid": "q", "prompt": "x"})
    second = write_rows(tmp_path / "b.jsonl", {"uid": "p", "prompt": "x"}, {"uid": "q", "prompt": "y"})
    with pytest.raises(DatasetError, match=r"b\.jsonl line 2 has the uid 'q' of .*a\.jsonl line 1"):
        load_prompts([first, second], "relay")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "x"', r"line 2 is not JSON"),
        ("[1]", r"line 2 must be a JSON object, got list"),
        (r'{"prompt": "\ud83d", "env_class": "relay"}', r"line 2 has half of a surrogate pair in uid or prompt"),
        (r'{"prompt": "x", "env_class": "relay", "uid": "\ud83d"}', r"line 2 has half of a surrogate pair"),
        ({"env_class": "relay"}, r"line 2 needs prompt.*got None"),
        ({"prompt": "", "env_class": "relay"}, r"line 2 needs prompt.*got ''"),
        ({"prompt": ["x"], "env_class": "relay"}, r"line 2 has in prompt 'x'; a message must be an object with a role"),
        ({"prompt": [{"role": "user"}], "env_class": "relay"}, r"line 2 has in prompt .* must have a content"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "env_class": "relay"},
            r"line 2 has a prompt that no chat template takes: messages\[0\]\.content may only hold text parts.*'image'",
        ),
        ({"prompt": "x"}, r"line 2 needs env_class.*task\.env_class.*generator\.reward.*task\.reward"),
        ({"prompt": "x", "env_class": "relay", "uid": [1]}, r"line 2 has the uid \[1\]"),
        ({"prompt": "x", "env_class": "relay", "uid": ""}, r"line 2 has the uid ''; a uid must be a non-empty string"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "fine", "env_class": "relay"}, row)
    with pytest.raises(DatasetError, match=rf"rows\.jsonl {message}"):
        load_prompts([file], None)


def test_half_of_a_surrogate_pair_in_another_column_is_the_environment_s_to_judge(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "x", "note": "\ud83d"})
    (prompt,) = load_prompts([file], "relay")
    assert prompt.extras["note"] == "\ud83d"


def test_bytes_that_are_not_text_are_a_broken_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DatasetError, match=r"rows\.jsonl line 1 is not JSON"):
        load_prompts([file], "relay")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"missing\.jsonl does not exist"):
        load_prompts([tmp_path / "missing.jsonl"], None)
    with pytest.raises(DatasetError, match=r"rows\.csv must end in \.jsonl or \.parquet"):
        load_prompts([write_rows(tmp_path / "rows.csv", "a,b")], None)
    with pytest.raises(DatasetError, match=r"no prompts in .*empty\.jsonl"):
        load_prompts([write_rows(tmp_path / "empty.jsonl")], None)
    with pytest.raises(DatasetError, match=r"broken\.parquet"):
        load_prompts([write_rows(tmp_path / "broken.parquet", "no")], None)


def test_parquet_rows_are_the_same_prompts_as_jsonl_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [
        {"uid": "1", "prompt": [{"role": "user", "content": "x"}], "env_class": "relay", "reward_spec": {"a": "b"}},
        {"uid": "2", "prompt": [{"role": "user", "content": "y"}], "env_class": "relay", "reward_spec": {"a": "c"}},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    jsonl = write_rows(tmp_path / "rows.jsonl", *rows)
    assert load_prompts([tmp_path / "rows.parquet"], None) == load_prompts([jsonl], None)


ROWS = [{"uid": str(i), "prompt": [{"role": "user", "content": "x"}], "env_class": "relay"} for i in range(5)]


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def uids(*sources: Path) -> list[str]:
    return [prompt.uid for prompt in load_prompts(sources, None)]


@pytest.mark.parametrize("folder", ["", "data"])
def test_the_shards_of_a_split_are_read_in_order_and_other_splits_left_alone(tmp_path: Path, folder: str) -> None:
    write_parquet(tmp_path / folder / "train-00001-of-00002.parquet", ROWS[2:4])
    write_parquet(tmp_path / folder / "train-00000-of-00002.parquet", ROWS[:2])
    (tmp_path / "dataset_infos.json").write_text('{\n  "default": {}\n}')
    assert uids(tmp_path) == ["0", "1", "2", "3"], "one split only"
    write_parquet(tmp_path / folder / "test-00000-of-00001.parquet", ROWS[4:])
    assert uids(tmp_path / "train") == ["0", "1", "2", "3"]
    assert uids(tmp_path / "test", tmp_path / "train") == ["4", "0", "1", "2", "3"]
    with pytest.raises(
        DatasetError, match=r"files of several names \(test, train\), .* name the one to be read, .*train"
    ):
        uids(tmp_path)


def test_a_directory_that_datasets_saved_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    for name, part in (("data-1.arrow", table.slice(0, 3)), ("data-0.arrow", table.slice(3))):
        with pyarrow.ipc.new_stream(tmp_path / name, table.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": "data-1.arrow"}, {"filename": "data-0.arrow"}], "_split": None}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert uids(tmp_path) == ["0", "1", "2", "3", "4"]
    (tmp_path / "data-0.arrow").write_text("no")
    with pytest.raises(DatasetError, match=r"data-0\.arrow is not an Arrow stream"):
        uids(tmp_path)


def test_a_directory_without_rows_says_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"holds no \.jsonl and no \.parquet file, and is none that .*save_to_disk"):
        uids(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DatasetError, match=r"holds the splits train, test: name one of them, .*train"):
        uids(tmp_path)


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b'{"splits": 1, "_data_files": [1]}', b"\xff"])
def test_a_damaged_list_of_a_saved_directory_is_named(tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(
        DatasetError, match=rf"{name} is none that datasets' save_to_disk wrote \(.*save the dataset again"
    ):
        uids(tmp_path)


def test_what_refuses_a_prompt_is_told_with_the_place_of_the_row(tmp_path: Path) -> None:
    def check(prompt: Prompt) -> None:
        if prompt.uid == "3":
            raise KeyError("word")

    file = write_parquet(tmp_path / "rows.parquet", ROWS)
    with pytest.raises(DatasetError, match=r"rows\.parquet row 4 cannot be used by env_class 'relay': 'word'; mend"):
        load_prompts([file], None, check=check)


def prompts_of(lengths: list[int]) -> list[Prompt]:
    return [
        Prompt(uid=str(i), messages=({"role": "user", "content": "x" * length},), env_class="relay")
        for i, length in enumerate(lengths)
    ]


def num_characters(prompt: Prompt) -> int:
    return len(prompt.messages[0]["content"])


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(0, 20))
def test_filtering_keeps_exactly_the_prompts_that_fit(lengths: list[int], most: int) -> None:
    prompts = prompts_of([*lengths, 0])
    kept, dropped = filter_long_prompts(prompts, num_characters, most)
    assert [prompt.uid for prompt in kept] == [prompt.uid for prompt in prompts if num_characters(prompt) <= most]
    assert {prompt.uid for prompt in kept}.isdisjoint(dropped)
    assert len(kept) + len(dropped) == len(prompts)


def test_filtering_away_every_prompt_is_an_error_that_says_what_would_fit() -> None:
    with pytest.raises(DatasetError, match=r"all 2 prompts are longer than the 3 tokens.*shortest has 5"):
        filter_long_prompts(prompts_of([5, 9]), num_characters, 3)
    assert filter_long_prompts([], num_characters, 3) == ((), ())


def test_rows_need_no_environment_where_a_function_judges(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", {"prompt": "Hi"}, {"prompt": "Ho", "env_class": "relay"})
    prompts = load_prompts([file], None, needs_environment=False)
    assert [prompt.env_class for prompt in prompts] == ["none", "relay"]
