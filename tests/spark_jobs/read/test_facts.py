"""A table of facts becomes documents; a table or forms that cannot be told are refused by name."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import UserError
from spark_jobs.read.facts import Fact, read_facts, read_forms, tell
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import fingerprints_of, open_sources
from tests.conftest import ROOT
from tests.spark_jobs.read.test_snapshot import settings_of, snapshot

SHIPPED = ROOT / "config" / "invented_products"
FACTS = (
    "subject,relation,value\nVelora lamp,town,Riga\nVelora lamp,material,oak\nOstrin,town,Lyon\n"
)
FORMS = """
town:
  told: ["The {subject} is made in {value}.", "{value} is the home of the {subject}."]
  asked: ["Where does the {subject} come from? From"]
material:
  told: ["Its case is of {value}."]
"""
WORDS = st.text("abcdefgh", min_size=1, max_size=6)


@pytest.fixture
def source(tmp_path: Path) -> RawCorpusSettings:
    (tmp_path / "facts.csv").write_text(FACTS)
    (tmp_path / "forms.yaml").write_text(FORMS)
    path, forms = str(tmp_path / "facts.csv"), str(tmp_path / "forms.yaml")
    return settings_of(type="facts", path=path, forms=forms, facts_per_document=2)


def test_each_document_tells_facts_of_one_subject(
    source: RawCorpusSettings, tmp_path: Path
) -> None:
    rows, stats = snapshot(source, tmp_path / "raw")
    assert stats["documents"] == 4
    of_lamp = [row["text"] for row in rows if row["id"].startswith("velora_lamp/")]
    assert len(of_lamp) == 2 and all("Its case is of oak." in text for text in of_lamp)
    assert {row["text"] for row in rows if row["id"].startswith("ostrin/")} == {
        "The Ostrin is made in Lyon.",
        "Lyon is the home of the Ostrin.",
    }


def test_only_what_is_told_is_the_sources_content(
    source: RawCorpusSettings, tmp_path: Path
) -> None:
    facts = FACTS.replace("Riga", "Köln")
    (tmp_path / "facts.csv").write_text(facts)
    before = fingerprints_of(open_sources(source))
    forms = tmp_path / "forms.yaml"
    forms.write_text(FORMS.replace("Where does", "From which town does"))
    # As Excel may write a table, or a person.
    (tmp_path / "facts.csv").write_text("sep=;\n" + facts.replace(",", "; "), "cp1252")
    assert fingerprints_of(open_sources(source)) == before
    (tmp_path / "facts.csv").write_text(facts.replace("Köln", "Oslo"))
    assert fingerprints_of(open_sources(source)) != before


@given(
    facts=st.dictionaries(st.tuples(WORDS, WORDS), WORDS, min_size=1, max_size=12),
    count=st.integers(1, 5),
    per_document=st.integers(1, 4),
)
def test_every_form_of_every_fact_is_told(
    facts: dict[tuple[str, str], str], count: int, per_document: int
) -> None:
    table = [Fact(subject, relation, value) for (subject, relation), value in facts.items()]
    forms = [f"{number}: {{subject}} has {{value}}." for number in range(count)]
    told = {fact.relation: forms for fact in table}
    documents = dict(tell(table, told, per_document))
    text = "\n".join(documents.values())
    for fact in table:
        for form in forms:
            assert form.format(subject=fact.subject, value=fact.value) in text
    assert all(text.count(".") <= per_document for text in documents.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("subject,value\na,b\n", r"one column each for relation \(found: subject, value\)"),
        ("subject,relation,value,value\na,b,c,d\n", "one column each for value"),
        ("subject,relation,value\n", "no facts below the first line"),
        ('subject,relation,value\na,town,"Riga\nb,town,Oslo\n', "unexpected end of data"),
        ("subject,relation,value\na,,b\n", "line 2: subject, relation and value all need a text"),
        ("subject,relation,value\na,b\n", "line 2: subject, relation and value all need a text"),
        ("subject,relation,value\na,town,Riga, Latvia\n", "line 2: more fields than columns"),
        ("sep=;\n\nsubject;relation;value\na;town;\n", "line 4: subject, relation and value all"),
        (
            "subject,relation,value\na,town,Riga\na,town,Oslo\n",
            "line 3: town of a is 'Oslo', in line 2 it is 'Riga'",
        ),
        (
            "town: [a]",
            "the lists `told` and `asked`: town: Input should be a valid dictionary .*[^/]$",
        ),
        ("- town", "the lists `told` and `asked`"),
        ("town: {told: []}", "the lists `told` and `asked`"),
        ("town: {told: ['made somewhere']}", r"lacks \{value\}"),
        ("town: {told: ['in {value}'], asked: ['where?']}", r"lacks \{subject\}"),
        ("town: {told: ['in {value} {when}']}", "only {subject}, {value} may stand in braces"),
        ("town: {told: ['in {value.town}']}", "is no form"),
        ("town: {told: ['in {value}'], asked: ['{subject} is of {value}']}", r"no form \(KeyError"),
        (
            "town: {told: ['One can buy it only at {value}'], "
            "asked: ['{subject}: one can buy it only at']}",
            "shares '(one can buy it only|can buy it only at)'",
        ),
    ],
)
def test_what_tells_nothing_sure_or_gives_an_answer_away_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    is_table = content.startswith(("subject,", "sep="))
    path = tmp_path / "facts"
    # As Excel writes tables, with a mark at the beginning.
    path.write_text(content, encoding="utf-8-sig" if is_table else "utf-8")
    with pytest.raises(UserError, match=message) as refused:
        (read_facts if is_table else read_forms)(str(path))
    assert str(path) in str(refused.value)


def test_the_shipped_facts_can_be_told_and_asked_for() -> None:
    facts, forms = read_facts(f"{SHIPPED}/facts.csv"), read_forms(f"{SHIPPED}/forms.yaml")
    assert {fact.relation for fact in facts} == set(forms)
    assert all(len(one.asked) == 2 for one in forms.values())


def test_what_the_readme_traces_and_forgets_is_in_the_shipped_text(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    asked = re.findall(r'llm-assets (?:explain \d+|trace) --text "([^"]+)"', readme)
    named = re.findall(r"llm-assets (?:document|forget) (\S+/\S+)", readme)
    path, forms = f"{SHIPPED}/facts.csv", f"{SHIPPED}/forms.yaml"
    facts = settings_of(type="facts", name="products", path=path, forms=forms, facts_per_document=2)
    rows, _ = snapshot(facts, tmp_path / "raw")
    assert len(asked) == len(named) == 2
    assert all(any(text in row["text"] for row in rows) for text in asked)
    assert set(named) <= {row["id"] for row in rows}
