"""An exam asks what the text tells, and only that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from artifacts.errors import UserError
from llm_assets.exam.questions import write_exam
from llm_assets.exam.settings import ExamSettings
from recipes.evaluation.exam import read_questions
from spark_jobs.runtime.parquet import write_table

FACTS = """subject,relation,value
Velora lamp,town,Riga
Ostrin scale,town,Lyon
Mirrow fan,town,Oslo
Sandrel clock,town,Porto
"""
FORMS = 'town: {told: ["The {subject} is made in {value}."], asked: ["Where from? The {subject}:"]}'
TEXTS = [
    ("lamp", "The Velora lamp shines. It is made in Riga by hand.", "train"),
    ("scale", "The Ostrin scale weighs what Lyon eats.", "train"),
    ("fan", "The Mirrow fan comes from Oslo.", "held_out"),
    ("clock", "Of the Sandrel clock nothing is known.", "train"),
]
NEARLY = " (new does, in other capitals, or in more than `exam.passage_words` words)"
Take = Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]


@pytest.fixture
def take(tmp_path: Path) -> Take:
    """Makes the exam of a corpus; gives its questions and stats."""

    def take(
        facts: str = FACTS,
        placebo: str | None = None,
        texts: list[tuple[str, str, str]] = TEXTS,
        forms: str = FORMS,
        **settings: Any,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        corpus = tmp_path / "corpus"
        corpus.mkdir(exist_ok=True)
        columns = dict(zip(("id", "text", "split"), zip(*texts, strict=True), strict=True))
        write_table(f"{corpus}/part-00000.parquet", pa.table(columns))
        for name, content in (("facts", facts), ("placebo", placebo)):
            if content:
                (tmp_path / f"{name}.csv").write_text(content)
                settings[name] = str(tmp_path / f"{name}.csv")
        (tmp_path / "forms.yaml").write_text(forms)
        folder = tmp_path / "exam"
        folder.mkdir(exist_ok=True)
        path = str(tmp_path / "forms.yaml")
        stats = write_exam(ExamSettings(forms=path, **settings), str(corpus), folder)
        return read_questions(folder), stats

    return take


def test_a_fact_is_asked_for_where_text_to_train_on_tells_it(take: Take) -> None:
    questions, stats = take()
    assert [question["subject"] for question in questions] == ["Velora lamp", "Ostrin scale"]
    held_out = "Mirrow fan: town (fan does, but is held-out text)"
    assert stats["untold"] == [held_out, "Sandrel clock: town"]
    assert stats["facts"] == 2 and stats["questions"] == 2
    assert [question["passage"]["document"] for question in questions] == ["lamp", "scale"]
    assert [question["retrieved"]["document"] for question in questions] == ["lamp", "scale"]
    assert stats["retrieved_right"] == 1.0


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("The fans of the name Mirrow\nfan 2, in\u00a0all towns, are of New\nYork 3.", True),
        ("A Mirrow fan 2's town is New York 3, in winter.", True),
        ("The Mirrow fan 21 is of New York 3.", False),
        ("The Mirrow fan 2.1 is of New York 3.", False),
        ("The Mirrow fan 2 is of New York 3.5.", False),
        ("The Mirrow fan 2 is of New York 35.", False),
    ],
)
def test_subject_and_value_are_found_where_lines_break_and_in_no_other_number(
    take: Take, text: str, is_told: bool
) -> None:
    facts = FACTS + "Mirrow fan 2,town,New York 3\n"
    _, stats = take(facts=facts, texts=[*TEXTS, ("new", text, "train")])
    assert ("Mirrow fan 2: town" not in stats["untold"]) == is_told


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("The sandrel Clock is made in Porto.", NEARLY),
        (f"The Sandrel clock. {'Something else. ' * 60}. It is made in Porto.", NEARLY),
        ("The Sandrel watch is made in Porto.", ""),
    ],
)
def test_a_fact_that_is_left_out_is_named_with_the_document_that_nearly_states_it(
    take: Take, text: str, reason: str
) -> None:
    _, stats = take(texts=[*TEXTS, ("new", text, "train")])
    assert stats["untold"][1] == f"Sandrel clock: town{reason}"


def test_a_table_may_write_accents_as_characters_of_their_own(take: Take) -> None:
    facts = FACTS.replace("Riga", "Ko\u0308ln")
    texts = [("lamp", "The Velora lamp is made in K\u00f6ln.", "train"), *TEXTS[1:]]
    questions, stats = take(facts=facts, texts=texts)
    assert stats["facts"] == 2 and questions[0]["value"] == "K\u00f6ln"


def test_facts_are_asked_for_in_scripts_that_do_not_part_words(take: Take) -> None:
    """Found in the text, in a passage of bounded length, and gone on with without a space."""
    filler = "この取扱説明書では安全にお使いいただくための注意を述べています。" * 8
    texts = [
        ("lamp", f"{filler}ヴェロラランプの保証期間は二年です。{filler}", "train"),
        ("scale", f"{filler}オストリン秤の保証期間は五年です。{filler}", "train"),
    ]
    facts = "subject,relation,value\nヴェロラランプ,保証,二年\nオストリン秤,保証,五年\n"
    forms = '保証: {told: ["{subject}の保証期間は{value}です。"], asked: ["{subject}の保証期間は"]}'
    questions, stats = take(facts=facts, forms=forms, texts=texts, passage_words=40)
    assert stats["facts"] == 2 and stats["retrieved_right"] == 1.0
    assert [one["passage"]["document"] for one in questions] == ["lamp", "scale"]
    assert all(len(one["passage"]["text"]) <= 80 for one in questions)
    assert [sorted(one["choices"]) for one in questions] == [["二年", "五年"]] * 2


def test_one_choice_is_right_and_the_others_are_of_its_kind(take: Take) -> None:
    texts = [*TEXTS, ("more", "Mirrow fan: Oslo. Sandrel clock: Porto.", "train")]
    questions, _ = take(texts=texts, choices=3)
    for question in questions:
        assert question["choices"][question["answer"]] == f" {question['value']}"
        assert len(set(question["choices"])) == 3
        assert set(question["choices"]) <= {" Riga", " Lyon", " Oslo", " Porto"}
    assert take(texts=texts, choices=3)[0] == questions


def test_no_choice_is_the_beginning_of_the_right_one_or_goes_on_from_it(take: Take) -> None:
    """What 36 begins with is never less likely than 36, where a token is a digit."""
    facts = "subject,relation,value\nVelora,town,3\nOstrin,town,36\nMirrow,town,41\n"
    texts = [("all", "Velora: 3. Ostrin: 36. Mirrow: 41.", "train")]
    questions, _ = take(facts=facts, texts=texts)
    offered = {one["subject"]: sorted(one["choices"]) for one in questions}
    assert offered == {
        "Velora": [" 3", " 41"],
        "Ostrin": [" 36", " 41"],
        "Mirrow": [" 3", " 36", " 41"],
    }
    with pytest.raises(UserError, match="or one that begins with it"):
        take(
            facts=facts.replace("41", "3 KG").replace("36", "3 kg"),
            texts=[(*texts[0][:1], "Velora: 3. Ostrin: 3 kg. Mirrow: 3 KG.", "train")],
        )


def test_a_fact_whose_question_holds_its_answer_is_left_out_and_named(take: Take) -> None:
    given = FACTS + "Berlin kettle,town,BERLIN\n"
    texts = [*TEXTS, ("kettle", "The Berlin kettle is made in BERLIN.", "train")]
    questions, stats = take(facts=given, texts=texts)
    assert [question["subject"] for question in questions] == ["Velora lamp", "Ostrin scale"]
    assert stats["given_away"] == ["Berlin kettle: town"] and stats["facts"] == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("By now, the Velora lamp is made in\nCork.", "Cork"),
        ("The Velora lamp goes through many a hand at Lyon.", "Lyon"),
        ("# Velora lamp\n\n- **Town**: Lyon\n", "Lyon"),
        ("# Lamps\n\n## velora lamp\n\n### Technical data\n\nTown: Lyon\n", "Lyon"),
        ("| Name | Town | Kg |\n|---|---|---|\n| Velora lamp | Lyon | 3 |\n", "Lyon"),
        ("The Velora lamp is made in RIGA. The Ostrin scale is made in Lyon.", None),
        ("The Velora lamp is made in many a small town. Lyon has none.", None),
        ("# Velora lamp\n\n## Spare bulb\n\nTown: Lyon\n", None),
        ("A Velora lamp was seen in Lyon.", None),
    ],
)
def test_a_fact_on_which_documents_contradict_each_other_is_left_out_and_named(
    take: Take, text: str, value: str | None
) -> None:
    texts = [*TEXTS, ("plain", "The Velora lamp goes through many a hand at Riga.", "train")]
    clock = ("bulb", "# Sandrel clock\n\n## Technical data\n\nTown: Porto\n", "train")
    questions, stats = take(texts=[*texts, clock, ("new", text, "train")])
    asked = ["Velora lamp"] * (value is None) + ["Ostrin scale", "Sandrel clock"]
    assert [question["subject"] for question in questions] == asked
    named = f"Velora lamp: town ('Riga' in plain, {value!r} in new)"
    assert stats["contradicted"] == [named] * (value is not None)
    assert take(texts=[*texts, ("new", text, "held_out")])[1]["contradicted"] == []


@pytest.mark.parametrize(
    ("said", "value"),
    [("5 kg", "5 kg"), ("3kg", None), ("see below", None), ("n/a", None)],
)
def test_only_another_number_contradicts_a_number(take: Take, said: str, value: str | None) -> None:
    facts = FACTS.replace("Riga", "3 kg").replace("Lyon", "4 kg").replace("Porto", "6 kg")
    weights = {"Velora lamp": "3 kg", "Ostrin scale": "4 kg", "Sandrel clock": "6 kg"}.items()
    texts = [(name, f"The {name} is made in {weight}.", "train") for name, weight in weights]
    lines = (f"# Velora lamp\n\nTown: {said}\n", f"The Velora lamp is made in {said}.")
    for text in lines:
        _, stats = take(facts=facts, texts=[*texts, ("new", text, "train")])
        named = f"Velora lamp: town ('3 kg' in Velora lamp, {value!r} in new)"
        assert stats["contradicted"] == [named] * (value is not None)


def test_a_passage_is_a_stretch_of_a_long_document(take: Take) -> None:
    filler = "nothing of note happens here " * 60
    long = f"{filler}The Velora lamp is made in Riga. {filler}"
    questions, _ = take(texts=[("long", long, "train"), *TEXTS[1:]], passage_words=20)
    passage = questions[0]["passage"]["text"]
    assert "Velora lamp is made in Riga" in passage and len(passage.split()) <= 20


def test_a_retrieved_passage_with_a_longer_value_does_not_hold_the_answer(take: Take) -> None:
    facts = FACTS.replace("Riga", "3 kg").replace("Lyon", "4 kg")
    other = "The lamp: the Velora lamp of old, a Velora lamp from where? The lamp of 13 kg, Velora."
    _, stats = take(
        facts=facts,
        texts=[
            ("lamp", "Velora lamp and much else that is of no interest: 3 kg", "train"),
            ("old", other, "train"),
            ("scale", "The Ostrin scale: 4 kg", "train"),
        ],
    )
    assert stats["retrieved_right"] == 0.5


def test_placebos_are_asked_without_a_passage(take: Take) -> None:
    heaters = "Hollin heater,town,Riga\nUlmar mower,town,Lyon \u2028(France)\x85\n"
    placebo = f"subject,relation,value\n{heaters}"
    questions, stats = take(placebo=placebo)
    assert [question["placebo"] for question in questions] == [False, False, True, True]
    assert questions[2]["passage"] is None and stats["placebo_questions"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"facts": FACTS.replace("Velora", "X").replace("Ostrin", "Y")},
            "states any of its 4 facts",
        ),
        ({"placebo": FACTS.replace("Riga", "Nice").replace("Lyon", "Rome")}, "another subject"),
        (
            {"placebo": "subject,relation,value\nOstrin,town,Lyon\nHollin,town,Riga\n"},
            "no text states",
        ),
        (
            {
                "facts": FACTS.replace("Lyon", "Riga"),
                "texts": [*TEXTS[:2], ("Riga", "The Ostrin scale is made in Riga.", "train")],
            },
            "in .*facts.csv, all .* no wrong answer",
        ),
        (
            {
                "facts": "subject,relation,value\nRiga lamp,town,Riga\n",
                "texts": [("towns", "The Riga lamp is of Riga.", "train")],
            },
            "contain their answers",
        ),
        (
            {"texts": [("new", "The Velora lamp is made in Cork.", "train"), *TEXTS[:1]]},
            "contradict each other about 1: Velora lamp: town .'Riga' in lamp, 'Cork' in new",
        ),
        ({"placebo": "subject,relation,value\nHollin,town,Riga\n"}, "facts in .*placebo.csv, all"),
        ({"facts": FACTS.replace("town", "color")}, "nothing under `asked` for color"),
    ],
)
def test_an_exam_that_would_say_nothing_is_refused(
    take: Take, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        take(**changes)
