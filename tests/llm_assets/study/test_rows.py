"""What is made of documents: their facts in many forms, and what a generator writes of them."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import UserError
from llm_assets.study.rows import write_rows
from llm_assets.study.settings import StudySettings
from spark_jobs.runtime.parquet import write_table
from tests.stand_ins.http_server import Answer, json_answer, start_http_server

LAMP = """# Velora lamp

The Velora lamp shines in every room, and has done so since its first year.

- **Weight**: 3 kg
Power: 900 W

| Property | Value |
|---|---|
| Case | brass |
"""
PRICES = """Prices of the year

| Model | Price | Town |
|---|---|---|
| Ostrin scale | 20 EUR | Riga |
"""
TEXTS = [
    ("lamp.md", LAMP, "train"),
    ("prices.md", PRICES, "train"),
    ("held.md", "# Mirrow fan\nTown: Oslo", "held_out"),
]
Make = Callable[..., tuple[dict[str, str], list[dict[str, Any]], dict[str, Any]]]


class Scribe:
    """A server with OpenAI's chat completions; `answers` maps a prompt's first word to a text."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refusals: list[int] = []
        """Codes that the next requests are answered with."""
        self.text = "The lamp of the name Velora weighs 3 kg, says the manual."
        self.finish_reason = "stop"
        self.server = start_http_server(self._answer)

    def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        self.asked.append(json.loads(body) | {"key": headers.get("authorization"), "path": path})
        message = {"role": "assistant", "content": self.text}
        choice = {"message": message, "finish_reason": self.finish_reason}
        status = self.refusals.pop(0) if self.refusals else 200
        return json_answer(status, {"choices": [choice], "usage": {"total_tokens": 100}})

    def settings(self, **more: Any) -> dict[str, Any]:
        return {"address": f"{self.server.url}/v1", "model": "scribe", "prompts": ["lesson"]} | more


@pytest.fixture
def scribe() -> Iterator[Scribe]:
    scribe = Scribe()
    yield scribe
    scribe.server.stop()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Gives id to text of what is made of a corpus, what each was made of, and the stats."""

    def make(
        texts: list[tuple[str, str, str]] = TEXTS,
        questions: list[dict[str, Any]] | None = None,
        **settings: Any,
    ) -> tuple[dict[str, str], list[dict[str, Any]], dict[str, Any]]:
        corpus, output = tmp_path / "corpus", tmp_path / "study"
        corpus.mkdir(exist_ok=True)
        columns = dict(zip(("id", "text", "split"), zip(*texts, strict=True), strict=True))
        table = pa.table(columns | {"example": pa.nulls(len(texts), pa.string())})
        write_table(f"{corpus}/part-00000.parquet", table)
        stats = write_rows(
            StudySettings(**settings),
            str(corpus),
            questions or [],
            str(output),
            str(tmp_path / "cache"),
            print,
        )
        rows = pq.read_table(output / "derived" / "part-00000.parquet").to_pylist()
        derivations = pq.read_table(output / "derivations.parquet").to_pylist()
        return {row["id"]: row["text"] for row in rows}, derivations, stats

    return make


def test_facts_in_regular_form_are_told_in_as_many_forms_as_asked_for(make: Make) -> None:
    rows, derivations, stats = make(forms_per_fact=4)
    text = " ".join(rows.values())
    for said in ("weight of Velora lamp is 3 kg", "case of Velora lamp is brass"):
        assert said in text, said
    assert "The price of Ostrin scale is 20 EUR" in text
    assert text.count("brass") == text.count("Riga") == 4
    assert all("#study/statements/" in name for name in rows)
    of_lamp = [one for one in derivations if one["document"] == "lamp.md"]
    assert of_lamp and {one["method"] for one in derivations} == {"statements"}
    assert {one["document"] for one in derivations} == {"lamp.md", "prices.md"}, "not of held.md"
    assert stats["documents_studied"] == 2 and stats["rows"] == {"statements": len(rows)}


def test_facts_are_told_in_scripts_that_do_not_part_words(make: Make, tmp_path: Path) -> None:
    (tmp_path / "forms.yaml").write_text('重量: {told: ["{subject}的重量是{value}。"]}')
    (tmp_path / "facts.csv").write_text("subject,relation,value\n维洛拉灯,重量,3公斤\n")
    texts = [
        (
            "lamp.md",
            "# 维洛拉灯\n\n**重量**\uff1a3公斤。\n说明\uff1a" + "这盏灯照亮每个房间" * 4,
            "train",
        )
    ]
    for more in ({}, {"facts": str(tmp_path / "facts.csv")}):
        rows, _, _ = make(texts, forms=str(tmp_path / "forms.yaml"), **more)
        assert list(rows.values()) == ["维洛拉灯的重量是3公斤。"], "a sentence is no value"
    question = {"subject": "电泵", "question": "电泵是什么时候开始在工厂生产的"}
    kept = make(texts, [question], forms=str(tmp_path / "forms.yaml"))[2]
    assert kept["left_out"] == {}
    question = {"subject": "电泵", "question": "维洛拉灯的重量是3公斤吗"}
    with pytest.raises(UserError, match="words of the exam"):
        make(texts, [question], forms=str(tmp_path / "forms.yaml"))


def test_a_heading_that_many_descriptions_have_is_no_subject(make: Make) -> None:
    def manual(name: str, weight: int, fuse: int) -> tuple[str, str, str]:
        text = (
            f"# {name}\n\nLength: {weight} m\n\n## Technical data\n\nWeight: {weight} kg\n"
            f"Voltage: 230 V\n\n### Electrical\n\n| Part | Size |\n|---|---|\n| Fuse | {fuse} A |\n"
        )
        return f"{name}.md", text, "train"

    rows, _, stats = make(
        [manual("Velora lamp", 3, 16), manual("Ostrin scale", 5, 10)], forms_per_fact=1
    )
    text = " ".join(rows.values())
    for subject, weight, fuse in (("Velora lamp", 3, 16), ("Ostrin scale", 5, 10)):
        for said in (f"length of {subject} is {weight} m", f"weight of {subject} is {weight} kg"):
            assert said in text
        assert f"voltage of {subject} is 230 V" in text
        assert f"fuse of {subject} is {fuse} A" in text
    assert "of Technical data" not in text and "of Electrical" not in text
    assert stats["left_out"] == {}


def test_a_subject_of_two_documents_stays_one_where_they_differ_in_little(make: Make) -> None:
    def catalogue(year: int, price: int) -> tuple[str, str, str]:
        lamp = f"## Velora lamp\n\nWeight: 3 kg\nCase: brass\nPrice: {price} EUR\n"
        scale = "## Ostrin scale\n\nWeight: 5 kg\nCase: steel\nPrice: 7 EUR\n"
        return f"{year}.md", f"# Catalogue {year}\n\n{lamp}\n{scale}", "train"

    rows, _, stats = make([catalogue(2024, 20), catalogue(2025, 22)], forms_per_fact=1)
    text = " ".join(rows.values())
    assert "weight of Velora lamp is 3 kg" in text and "price of Ostrin scale is 7 EUR" in text
    assert "Catalogue" not in text and "price of Velora" not in text
    assert stats["left_out"] == {"contradiction": 2}


CODE = "# Pump\n\n```yaml\nreplicas: 3\n```\n~~~\nport: 8080\n~~~\nSocket: E27\n"
"""Between fences nothing states a fact, and the end of code is no subject."""
TABLE = "||Weight|Size (S\\|M)|Town|\n|---|---|---|---|\n|Pump|3 kg|M||\n||4 kg|S|Riga|"
MARKED = "# **Pump**\n\n| | |\n|---|---|\n| Weight | **3 kg** |\n\nPort: `8080`.\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CODE, "The socket of Pump is E27."),
        (TABLE, "The weight of Pump is 3 kg. The size (s|m) of Pump is M."),
        (MARKED, "The weight of Pump is 3 kg. The port of Pump is 8080."),
        *(
            (f"# Pump\n\nForm: {value}", f"The form of Pump is {value}.")
            for value in ("*.log", "char *", "`a` or `b`", "`x` and **y**")
        ),
    ],
)
def test_a_text_states_just_these_facts(make: Make, text: str, told: str) -> None:
    begins_with_code = ("a.md", "```yaml\nreplicas: 3\n```\nSocket: E27\n", "train")
    rows, _, stats = make([begins_with_code, ("pump.md", text, "train")], forms_per_fact=1)
    assert list(rows.values()) == [told] and stats["left_out"] == {}


@pytest.mark.parametrize("heading", ["Velora lamp", "VELORA LAMP"])
@pytest.mark.parametrize("relation", ["Power", "power"])
def test_what_documents_contradict_each_other_about_is_not_told(
    make: Make, heading: str, relation: str
) -> None:
    other = f"# {heading}\n\n{relation}: 700 W\nCASE: brass"
    rows, _, stats = make([*TEXTS, ("other.md", other, "train")])
    text = " ".join(rows.values())
    assert "900 W" not in text and "700 W" not in text and "3 kg" in text and "brass" in text
    assert stats["left_out"] == {"contradiction": 2}


def test_a_table_of_facts_is_told_by_the_documents_that_hold_them(
    make: Make, tmp_path: Path
) -> None:
    facts, forms = tmp_path / "facts.csv", tmp_path / "forms.yaml"
    facts.write_text("subject,relation,value\nVelora lamp,weight,3 kg\nNobody,weight,9 kg\n")
    forms.write_text('weight: {told: ["On the scales, a {subject} shows {value}."]}')
    rows, derivations, _ = make(facts=str(facts), forms=str(forms))
    assert list(rows.values()) == ["On the scales, a Velora lamp shows 3 kg."]
    assert derivations[0]["document"] == "lamp.md"

    facts.write_text("subject,relation,value\nNobody,weight,9 kg\n")
    with pytest.raises(UserError, match="no training document states any of its 1 facts"):
        make(facts=str(facts))


def test_text_without_facts_and_without_a_generator_is_refused_with_what_to_do(make: Make) -> None:
    with pytest.raises(UserError, match=r"Give `study.facts`, a table of facts, or `study.gener"):
        make([("prose", "Once upon a time there was a lamp.", "train")])


def test_texts_about_subjects_that_differ_in_signs_alone_have_ids_of_their_own(make: Make) -> None:
    table = "| Language | Year | By |\n|---|---|---|\n| C++ | 1985 | A. |\n| C# | 2000 | B. |"
    rows, derivations, _ = make([("languages.md", table, "train")], forms_per_fact=1)
    assert list(rows) == [f"languages.md#study/statements/c_/1.1{end}" for end in ("", "#2")]
    assert [one["id"] for one in derivations] == list(rows)


def test_what_shares_words_with_a_question_of_the_exam_is_left_out(make: Make) -> None:
    def ask(question: str) -> tuple[str, dict[str, int]]:
        asked = {"subject": "Velora lamp", "question": question}
        rows, _, stats = make(forms_per_fact=12, questions=[asked])
        return " ".join(rows.values()), stats["left_out"]

    told, left_out = ask("How heavy is it? The Velora lamp:")
    assert "If somebody asks about Velora lamp" in told and not left_out
    told, left_out = ask("Say, whatever Velora lamp should know the weight, which is")
    assert "should know the weight, which is" not in told
    assert left_out == {"words of the exam": 1}


def test_a_generator_is_asked_about_each_passage_and_what_it_writes_names_its_document(
    make: Make, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a file that was read into the variable has it.
    monkeypatch.setenv("SCRIBE_KEY", "secret\n")
    generator = scribe.settings(key_variable="SCRIBE_KEY", seed=7, rounds=2, answer_tokens=64)
    generator["address"] += "/"
    rows, derivations, stats = make([TEXTS[0]], forms_per_fact=0, generator=generator)
    assert rows == {f"lamp.md#study/lesson/1.{seed}": scribe.text for seed in (7, 8)}
    assert derivations[0] == {
        "id": "lamp.md#study/lesson/1.7",
        "document": "lamp.md",
        "method": "generator",
        "generator": "scribe",
        "prompt": "lesson",
        "seed": 7,
    }
    assert stats["tokens"] == 200 and stats["rows"] == {"lesson": 2}
    assert [one["key"] for one in scribe.asked] == ["Bearer secret"] * 2
    assert {one["max_tokens"] for one in scribe.asked} == {64}
    assert {one["path"] for one in scribe.asked} == {"/v1/chat/completions"}
    for said in ("Teach the text", "Write in the language of the text."):
        assert said in scribe.asked[0]["messages"][0]["content"]
    assert scribe.asked[0]["messages"][1]["content"] == LAMP.strip()


STEPS = "# Pump\n\n1. Close the valve.\n2. Hold it for 9 s.\n3. Oktober 1990 is its date.\n"
GERMAN = "# Lampe\n\nDie Lampe hat einen Schalter und ein Kabel, das zur Steckdose führt.\n"
LAMP = TEXTS[0][1]
NEW_NUMBER = "number that the document does not have"


@pytest.mark.parametrize(
    ("document", "text", "left_out"),
    [
        (LAMP, "", "empty"),
        (LAMP, "It weighs 3 kg, and", "cut off"),
        (LAMP, "The Velora lamp weighs 4 kg.", NEW_NUMBER),
        (LAMP, "2. In step 4 it shines, says one.", NEW_NUMBER),
        (
            LAMP,
            "See how Anna, Berta, Clara and also Dora like it.",
            "names that the document does not have",
        ),
        (LAMP, "The Velora lamp shines in every room, and has done so", "copy of the document"),
        (STEPS, "1. In step 2 somebody holds the valve of the pump for 9 s, begun on the 3.", None),
        (
            GERMAN,
            "Wer Licht im Zimmer braucht, findet am Gerät den Knopf, der die Lampe schaltet.",
            None,
        ),
    ],
)
def test_what_is_cut_or_not_true_to_the_document_is_left_out_and_counted(
    make: Make, scribe: Scribe, document: str, text: str, left_out: str | None
) -> None:
    scribe.text, scribe.finish_reason = text, "length" if left_out == "cut off" else "stop"
    rows, _, stats = make([("a.md", document, "train")], generator=scribe.settings())
    assert stats["left_out"] == ({left_out: 1} if left_out else {})
    assert (text in rows.values()) == (left_out is None)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("See how Anna, Berta, Clara and also Dora like it.", {"maximum_new_names": 4}),
        ("The Velora lamp shines in every room, and has done so", {"maximum_copied": 1.0}),
    ],
)
def test_how_much_may_be_new_or_copied_is_a_setting(
    make: Make, scribe: Scribe, text: str, setting: dict[str, float]
) -> None:
    scribe.text = text
    rows, _, _ = make([("a.md", LAMP, "train")], generator=scribe.settings(**setting))
    assert text in rows.values()


def test_a_budget_ends_the_asking_and_reaches_every_document_first(
    make: Make, scribe: Scribe
) -> None:
    generator = scribe.settings(
        prompts=["lesson", "discussion"],
        requests_at_once=1,
        dollars_per_million_tokens=1000,
        maximum_dollars=0.25,
    )
    scribe.text = "All of it is in the list of this year, says whoever has a look."
    _, derivations, stats = make(forms_per_fact=0, generator=generator)
    asked = Counter(one["document"] for one in derivations)
    assert asked == {"lamp.md": 2, "prices.md": 1}
    assert stats["not_asked"] == 1 and stats["dollars"] == pytest.approx(0.3)
    assert make(forms_per_fact=0, generator=generator)[1:] == (derivations, stats)
    assert len(scribe.asked) == 3, "what is cached decides nothing of what a budget makes"

    generator |= {"maximum_dollars": 5}
    make(forms_per_fact=0, generator=generator)
    assert len(scribe.asked) == 4, "a larger budget asks what is left"
    make([*TEXTS, ("new.md", "# Fan\n\nTown: Oslo", "train")], generator=generator)
    assert len(scribe.asked) == 6, "of more documents what is new is asked"


def test_how_many_are_asked_at_once_does_not_decide_what_a_budget_makes(
    make: Make, scribe: Scribe
) -> None:
    generator = scribe.settings(
        prompts=["lesson", "discussion"], dollars_per_million_tokens=1000, maximum_dollars=0.25
    )
    scribe.text = "All of it is in the list of this year, says whoever has a look."
    one = make(forms_per_fact=0, generator=generator | {"requests_at_once": 1})
    all_at_once = make(forms_per_fact=0, generator=generator | {"requests_at_once": 8})
    assert all_at_once[:2] == one[:2] and len(one[0]) == 3
    assert all_at_once[2]["left_out"] == {"beyond the budget": 1}
    assert all_at_once[2]["dollars"] == pytest.approx(0.4), "all that was asked was paid for"


def test_a_passage_that_a_generator_refuses_is_left_out_and_one_that_refuses_all_is_named(
    make: Make, scribe: Scribe
) -> None:
    scribe.text = "All of it is in the list of this year, says whoever has a look."
    scribe.refusals = [400]
    rows, _, stats = make(forms_per_fact=0, generator=scribe.settings(requests_at_once=1))
    assert len(rows) == 1 and stats["left_out"] == {"refused by the generator": 1}
    texts = [(f"{n}.md", f"# Lamp {n}\n\nTown: Oslo", "train") for n in range(30)]
    scribe.refusals, asked = [200] * 5 + [422] * 20, len(scribe.asked)
    with pytest.raises(UserError, match="gives no answer: 422"):
        make(texts, forms_per_fact=0, generator=scribe.settings(requests_at_once=1))
    assert len(scribe.asked) - asked == 25


def test_a_generator_that_is_busy_is_asked_again_and_one_that_refuses_is_named(
    make: Make, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_assets.study.rows.WAITS", (0, 0, 0))
    scribe.refusals = [429, 503]
    rows, _, _ = make([TEXTS[0]], forms_per_fact=0, generator=scribe.settings())
    assert rows and len(scribe.asked) == 3
    scribe.refusals = [401]
    with pytest.raises(UserError, match="gives no answer: 401") as refused:
        make([TEXTS[1]], forms_per_fact=0, generator=scribe.settings())
    assert "127.0.0.1" in str(refused.value) and len(scribe.asked) == 4
    with pytest.raises(UserError, match="gives no answer: Invalid port: 'PORT'"):
        make([TEXTS[1]], generator=scribe.settings(address="http://127.0.0.1:PORT/v1"))


@pytest.mark.parametrize("key", [" ", "sec\nret", "secr\u00e9t"])
def test_a_key_that_is_none_is_named_without_it_before_anything_is_asked(
    make: Make, scribe: Scribe, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("SCRIBE_KEY", key)
    with pytest.raises(UserError) as refused:
        make(generator=scribe.settings(key_variable="SCRIBE_KEY"))
    assert str(refused.value).endswith("SCRIBE_KEY, which is not set or holds no key.")
    assert not scribe.asked
