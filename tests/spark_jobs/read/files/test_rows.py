"""Input as it should not be: named with its file and row, or set aside and counted."""

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import UserError
from tests.spark_jobs.read.files.test_formats import texts_of
from tests.spark_jobs.read.test_snapshot import files_source, snapshot


def test_parquet_files_of_one_folder_may_differ_in_what_is_not_read(
    folder: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["alpha"], "stars": [3]}), folder / "a.parquet")
    large = pa.table({"language": ["de"], "text": pa.array(["beta"], pa.large_string())})
    pq.write_table(large, folder / "b.parquet")
    dictionary = pa.table({"text": pa.array(["gamma"]).dictionary_encode()})
    pq.write_table(dictionary, folder / "c.parquet")

    rows, _ = snapshot(files_source(folder), tmp_path / "raw")

    assert [row["text"] for row in rows] == ["alpha", "beta", "gamma"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"body": ["beta"]}, r"b.parquet has no column 'text'; its columns are body"),
        ({"text": [7]}, r"b.parquet, row 1: no text under the key 'text', but a number"),
        ({"text": [None]}, r"b.parquet, row 1: no text under the key 'text', but null"),
        ({"text": [["a"]]}, r"b.parquet, row 1: no text under the key 'text', but a list"),
        ({"text": [{"b": "c"}]}, r"b.parquet, row 1: no text under the key 'text', but an object"),
    ],
    ids=["missing column", "column of numbers", "null", "lists", "objects"],
)
def test_a_parquet_file_whose_text_differs_is_named(
    folder: Path, tmp_path: Path, second: dict[str, list], message: str
) -> None:
    pq.write_table(pa.table({"text": ["alpha"]}), folder / "a.parquet")
    pq.write_table(pa.table(second), folder / "b.parquet")

    with pytest.raises(UserError, match=message):
        snapshot(files_source(folder), tmp_path / "raw")


def test_parquet_text_that_is_not_utf8_is_set_aside_with_its_row(tmp_path: Path) -> None:
    texts = [b"sound"] * 199
    texts.insert(120, b"caf\xe9")
    # Nothing looks whether the bytes are UTF-8.
    column = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts).buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")

    rows, stats = snapshot(files_source(tmp_path / "a.parquet"), tmp_path / "raw")

    assert len(rows) == 199 and stats["dropped"] == {"not_utf8": 1}
    assert "a.parquet: row 121 is not UTF-8" in stats["faults"][0]


ANSWERED = "Question: {question}\nAnswer: {answer}\nTags: {about.tags}"


def test_a_template_makes_one_text_of_the_columns_that_hold_any(
    folder: Path, tmp_path: Path
) -> None:
    asked = [
        {"question": "Why?", "answer": "It leaks.", "about": {"tags": ["pump", "seal"]}},
        {"question": "How many?", "answer": 7, "about": None},
        {"question": "Alone"},
    ]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    (folder / "b.csv").write_text('question,answer,about\n"What, now?","Two\nlines",x\n')
    pq.write_table(
        pa.table({"question": ["Where?"], "answer": [1.5], "about": [{"tags": ["a"]}]}),
        folder / "c.parquet",
    )

    rows, stats = snapshot(files_source(folder, text_template=ANSWERED), tmp_path / "raw")

    assert [row["text"] for row in rows] == [
        "Question: Why?\nAnswer: It leaks.\nTags: pump\nseal",
        "Question: How many?\nAnswer: 7",
        "Question: Alone",
        "Question: What, now?\nAnswer: Two\nlines",
        "Question: Where?\nAnswer: 1.5\nTags: a",
    ]
    assert not stats["dropped"]


def test_dates_times_and_exact_numbers_are_told_and_ids(folder: Path, tmp_path: Path) -> None:
    columns = {
        "day": pa.array([date(2024, 5, 17)]),
        "at": pa.array([datetime(2024, 5, 17, 9, 30)], pa.timestamp("ms")),
        "clock": pa.array([time(9, 30)], pa.time32("s")),
        "took": pa.array([timedelta(minutes=5)], pa.duration("s")),
        "price": pa.array([Decimal("12.50")]),
        "key": pa.array([UUID(int=7).bytes], pa.uuid()),
    }
    pq.write_table(pa.table(columns), folder / "a.parquet")
    template = "\n".join(f"{{{name}}}" for name in columns)

    source = files_source(folder, text_template=template, id_column="key")
    (row,), _ = snapshot(source, tmp_path / "raw")

    assert row["id"] == "00000000-0000-0000-0000-000000000007"
    assert row["text"].splitlines() == [
        *("2024-05-17", "2024-05-17 09:30:00", "09:30:00", "0:05:00", "12.50"),
        "00000000-0000-0000-0000-000000000007",
    ]


def test_a_table_is_separated_by_what_separates_its_column_names(
    folder: Path, tmp_path: Path
) -> None:
    # As programs write for Excel, which hides a line that names the separator.
    table = 'sep=;\n\n"size, mm";text\n"1,5";"A pump; it turns."\n2;Short, sharp.\n'
    (folder / "a.csv").write_text(table)
    (folder / "b.csv").write_text("text\nOne column; and,\tno other.\n")
    # As a spreadsheet writes a table that does not begin at its top.
    (folder / "c.tsv").write_text("\n\t\ntext\tstars\nTabs; and, more.\t5\n")
    # As people write one, and as one may have to name its columns in the settings.
    (folder / "d.csv").write_text('stars , text \n5, "Blanks, too."\n')

    rows, _ = snapshot(files_source(folder), tmp_path / "raw")
    blanks, _ = snapshot(
        files_source(folder / "d.csv", text_column=" text", id_column="stars"), tmp_path / "again"
    )

    texts = [row["text"] for row in rows]
    assert texts == [
        "A pump; it turns.",
        "Short, sharp.",
        "One column; and,\tno other.",
        "Tabs; and, more.",
        "Blanks, too.",
    ]
    assert [(row["id"], row["text"]) for row in blanks] == [("5", "Blanks, too.")]


def test_two_columns_of_one_name_are_refused_where_the_name_is_read(
    folder: Path, tmp_path: Path
) -> None:
    columns = list(map(pa.array, (["a"], ["b"], ["c"])))
    pq.write_table(pa.table(columns, names=["x", "x", "text"]), folder / "a.parquet")
    (folder / "b.csv").write_text("x,x,text\n1,2,d\n")
    rows, _ = snapshot(files_source(folder), tmp_path / "raw")
    assert [row["text"] for row in rows] == ["c", "d"]

    for name in ("a.parquet", "b.csv"):
        source = files_source(folder / name, id_column="x")
        with pytest.raises(UserError, match=f"{name} has 2 columns named 'x'.*Rename all but one"):
            snapshot(source, tmp_path / "again")


def test_two_columns_named_input_are_refused_for_alpaca_alone(tmp_path: Path) -> None:
    names = ["input", "input", "instruction", "output"]
    columns = [pa.array([text]) for text in ("a", "b", "Say yes.", "Yes.")]
    pq.write_table(pa.table(columns, names=names), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text(",".join(names) + "\na,b,Say yes.,Yes.\n")
    pairs = {"form": "pairs", "document_column": "instruction", "summary_column": "output"}

    for name in ("a.parquet", "b.csv"):
        rows, _ = snapshot(files_source(tmp_path / name, examples=pairs), tmp_path / name[0])
        assert len(rows) == 1
        alpaca = files_source(
            tmp_path / name, examples={"form": "conversations", "layout": "alpaca"}
        )
        with pytest.raises(UserError, match=f"{name} has 2 columns named 'input'"):
            snapshot(alpaca, tmp_path / "again")


def test_a_row_with_more_fields_than_columns_is_set_aside_and_not_cut(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "a.csv").write_text('note,text\nx,One, two.\n\n,"Three, four."\n,Five.,\n')

    source = files_source(folder, maximum_faulty_share=0.5)
    rows, stats = snapshot(source, tmp_path / "raw")

    assert [row["text"] for row in rows] == ["Three, four.", "Five."]
    assert stats["dropped"] == {"too_many_fields": 1}
    assert "a.csv, row 1: more fields than the table has columns" in stats["faults"][0]


def test_quotes_in_a_table_separated_by_tabs_may_be_part_of_the_text(folder: Path) -> None:
    plain = 'text\n"Open" the valve.\n"Stop, he said.\nFour.\n"Six."\n'
    (folder / "plain.tsv").write_text("".join(f"x\t{line}\n" for line in plain.splitlines()))
    (folder / "quoted.tsv").write_text('x\ttext\nx\t"One ""two""\nthree."\nx\tFour.\n')

    assert list(texts_of(folder).values()) == [
        '"Open" the valve.',
        '"Stop, he said.',
        "Four.",
        '"Six."',
        'One "two"\nthree.',
        "Four.",
    ]


@pytest.mark.parametrize("last", ["Six.\n", "Six.", "\n\n"])
def test_a_quote_that_nothing_closes_is_named_and_swallows_no_rows(folder: Path, last: str) -> None:
    (folder / "a.csv").write_text(f'text,note\n"One,\ntwo.",x\nThree.,"Stop\nFive.,y\n{last}')

    message = "a.csv, row 2: a field begins with a double quote that nothing closes"
    with pytest.raises(UserError, match=message):
        texts_of(folder)


def test_of_several_templates_each_row_takes_the_one_that_it_has(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "a.jsonl").write_text(
        '{"body": "It turns."}\n{"title": "Pump", "body": "It leaks."}\n'
    )
    (folder / "b.csv").write_text("q,a\nWhy?,Rust.\n")
    pq.write_table(pa.table({"body": ["It stops."], "stars": [3]}), folder / "c.parquet")
    templates = ["{title}\n{body}", "{q} {a}", "{body}"]

    rows, _ = snapshot(files_source(folder, text_template=templates), tmp_path / "raw")

    texts = [row["text"] for row in rows]
    assert texts == ["It turns.", "Pump\nIt leaks.", "Why? Rust.", "It stops."]
    (folder / "d.csv").write_text("color\nred\n")
    with pytest.raises(UserError, match=r"d.csv has no column 'title'; its columns are color"):
        snapshot(files_source(folder, text_template=templates), tmp_path / "again")


def test_a_row_with_nothing_under_a_templates_columns_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "x"}\n')
    with pytest.raises(UserError, match=r"a.jsonl, line 1: nothing under question, answer"):
        template = "{question}: {answer}"
        snapshot(files_source(tmp_path / "a.jsonl", text_template=template), tmp_path / "raw")


def test_settings_without_a_template_decide_what_they_did(tmp_path: Path) -> None:
    (without,) = files_source(tmp_path).content()["sources"]
    (with_one,) = files_source(tmp_path, text_template="{a}").content()["sources"]
    assert "text_template" not in without
    assert with_one["text_template"] == "{a}"


@pytest.mark.parametrize("indent", [None, 1])
def test_rows_that_an_export_wraps_are_rows(
    folder: Path, tmp_path: Path, indent: int | None
) -> None:
    issues = [{"fields": {"summary": "It leaks"}}, {"fields": {"summary": "It hums"}}]
    wrapped = {"total": 2, "names": ["a"], "issues": issues}
    (folder / "jira.json").write_text(json.dumps(wrapped, indent=indent))
    # A feed says in a few words what its rows are about.
    feed = {"title": "What is new in the plant", "fields": {"summary": "Plant news"}}
    (folder / "feed.json").write_text(json.dumps(feed | {"items": issues}, indent=indent))
    # What has a text of its own, and what has prose under another key, wraps nothing.
    whole = {"fields": {"summary": "水泵每周打开一次。"}, "parts": issues}
    (folder / "whole.json").write_text(json.dumps(whole, indent=indent))
    short = {"fields": {"summary": "The pump"}, "parts": [*issues, {"name": "valve"}]}
    (folder / "short.json").write_text(json.dumps(short, indent=indent))
    prose = {"note": "水泵每周打开一次。", "parts": issues}
    (folder / "prose.json").write_text(json.dumps(prose, indent=indent))
    source = files_source(folder, text_column="fields.summary", maximum_faulty_share=0.5)

    rows, stats = snapshot(source, tmp_path / "raw")

    assert {row["id"]: row["text"] for row in rows} == {
        "jira.json:1": "It leaks",
        "jira.json:2": "It hums",
        "feed.json:1": "It leaks",
        "feed.json:2": "It hums",
        "whole.json:1": "水泵每周打开一次。",
        "short.json:1": "The pump",
    }
    assert stats["dropped"] == {"no_text": 1}


def test_faults_of_older_files_do_not_hide_those_of_a_new_one(folder: Path, tmp_path: Path) -> None:
    old = [{"body": {"text": None}}] * 8 + [{"body": {"text": "alpha"}}] * 90
    new = [{"body": {"content": "beta"}}, {"body": {"text": "gamma"}}]
    for name, rows in (("2026-11-01.jsonl", old), ("2026-11-02.jsonl", new)):
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    source = files_source(folder, text_column="body.text", maximum_faulty_share=0.1)

    _, stats = snapshot(source, tmp_path / "raw")

    assert stats["dropped"] == {"no_text": 9}
    *of_old, of_new = stats["faults"]
    assert len(of_old) == 5 and all("under the key 'body.text', but null" in one for one in of_old)
    assert "2026-11-02.jsonl, line 1: no text under the key 'body.text' (found: body)" in of_new
