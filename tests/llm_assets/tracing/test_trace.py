"""From an answer to what was truly trained on: planted documents, the command's words, the page."""

import json
import random
import re
import shutil
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from artifacts.errors import MissingArtifact, UserError
from artifacts.shards.shard_set import Shard, ShardSet
from artifacts.store.identity import Identity
from llm_assets.cli.text.trace import told
from llm_assets.config import PipelineSettings
from llm_assets.maintenance import cleaning as maintenance
from llm_assets.maintenance.cleaning import Removal, remove
from llm_assets.operation_settings import ForgettingSettings, RetentionSettings
from llm_assets.registry.state import ModelVersion
from llm_assets.tracing import training_text
from llm_assets.tracing.explain import Passages, find_passages
from llm_assets.tracing.trace import MOST_CHARACTERS, Trace, Tracer, find_answers
from recipes.data.records import TRAINED_NAME
from serving.engine.protocol import GenerateRequest
from serving.journal import Journal
from serving.settings import JournalSettings
from serving.state import OfVersion
from tests.llm_assets.trained_store import LICENSE, TrainedStore, write_clean
from tests.tiny import tiny_texts

PLANTED = (
    "The blue lever of Zanzibar is greased with walnut oil by the night watch alone.",
    "Nobody but the harbor master may wind the brass clock above pump seventeen.",
    "Seven jars of quince jelly stand behind the boiler for whoever mends the whistle.",
    "Old Marguerite counts every rivet twice before the ferry to Lisbon may cast off.",
    "Under the third floorboard lies a violin that belonged to the first engineer.",
    "When the fog bell rings backwards, all hands drink cold tea with juniper.",
)
"""Documents `manual/0`, `manual/10`, …, all of which may be trained on."""
HELD_OUT = 9
HOSTILE = "<script>alert(1)</script>"
VERSION = OfVersion(version="1", fingerprint="f")
ASKED = [GenerateRequest(prompt="Who?", max_tokens=1, max_prompt_tokens=9, temperature=0, top_p=1)]


def special(number: int) -> str:
    """Text with the name of a special token, which in text is text."""
    return (
        f"Caf\u00e9 {number} has a sign of brass that reads <|endoftext|> beside its keeper's door."
    )


@dataclass(frozen=True)
class Audited:
    """What a run wrote down of one row when it trained on it."""

    version: int
    step: int
    row: int
    shard: str
    place: int
    """The row's number in the shard."""
    texts: dict[str, str]
    """Document to what stands of it in the row."""


class Lab(TrainedStore):
    """Two versions, the second from the first over shards that were cut otherwise."""

    def __init__(self, folder: Path, model: Path) -> None:
        texts = tiny_texts()
        for number, text in enumerate(PLANTED):
            texts[10 * number] = f"{text} {HOSTILE}"
        texts[10 * 3] += f" {special(3)}"
        super().__init__(folder, model, texts)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.documents = texts
        self.first = self.train(steps=12, audit_rows=True)
        self.cut(3)
        self.second = self.train(steps=4, audit_rows=True)
        self.audit = [one for of in (self.first, self.second) for one in self._audit(of)]
        read = [part for one in self.audit if one.version == 1 for part in one.texts.values()]
        self.said = next(text for text in PLANTED if any(text[:70] in part for part in read))
        self.document = f"manual/{10 * PLANTED.index(self.said)}"

    def trace(self, answer: str, version: ModelVersion | None = None) -> Trace:
        tracer = Tracer(self.store, lambda line: None)
        return tracer.trace(self.registry.state(), version or self.first, answer)

    def _audit(self, version: ModelVersion) -> Iterator[Audited]:
        spec = self.spec(version)
        shards = ShardSet(spec.shards_folder, spec.shards, "train")
        ends = shards.ends.tolist()
        for line in (Path(spec.run_folder) / "rows-0.jsonl").read_text().splitlines():
            step = json.loads(line)
            for row in step["rows"]:
                number = bisect_right(ends, row)
                shard, place = shards.shard(number), row - [0, *ends][number]
                name, texts = shard.entry.name, self._texts_of(shard, place)
                yield Audited(version.version, step["step"], row, name, place, texts)

    def _texts_of(self, shard: Shard, place: int) -> dict[str, str]:
        ids = shard.documents()["id"].to_pylist()
        first, last = shard.row_offsets[place : place + 2]
        return {
            ids[one["document"]]: self._tokenizer.decode(
                shard.tokens[place, one["start"] : one["start"] + one["length"]].tolist()
            )
            for one in shard.segments[first:last]
        }


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"), tiny_model_folder)


def test_a_planted_document_is_named_with_row_step_license_and_neighbors(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    found = lab.trace(f"As the manual says, {lab.said[4:60]} and so on.")
    said = capfd.readouterr().err
    assert "WARN" not in said and "log level" not in said, "Spark, which builds the index, is quiet"

    assert found.verdict == "verbatim" and 0.3 < found.share < 1
    longest = found.verbatim[0]
    said = found.answer[longest.start : longest.end]
    assert said.strip() in lab.said and len(said) > 40
    source = longest.sources[0]
    assert (source.document, source.license, source.source) == (lab.document, LICENSE, "manual")
    assert source.text == said
    assert source.before + source.text + source.after in f"{lab.said} {HOSTILE}<|endoftext|>"
    assert source.before and source.after
    (lesson,) = source.lessons
    read = [one for one in lab.audit if one.version == 1 and lab.document in one.texts]
    assert lesson.run.version == 1 and lesson.steps == sorted({one.step for one in read})
    assert "VERBATIM" in "\n".join(told(found)) and LICENSE in "\n".join(told(found))


def test_all_of_an_answer_is_said_to_occur_only_where_nothing_is_missing(lab: Lab) -> None:
    found = lab.trace(lab.said)
    assert found.verbatim
    whole = replace(found.verbatim[0], start=0, end=999)
    nearly = replace(found, answer="a" * 1000, verbatim=[whole])
    assert next(told(nearly)).startswith("VERBATIM: 99% of the answer")
    hardly = replace(nearly, verbatim=[replace(whole, end=4)])
    assert next(told(hardly)).startswith("VERBATIM: less than 1% of the answer")
    everything = replace(nearly, verbatim=[replace(whole, end=1000)])
    assert next(told(everything)).startswith("VERBATIM: 100% of the answer")


@pytest.mark.parametrize("number", [1, 2])
def test_only_rows_that_the_audit_has_are_shown(lab: Lab, number: int) -> None:
    audit = [one for one in lab.audit if one.version <= number]
    read: dict[str, list[Audited]] = {}
    for one in audit:
        for document in one.texts:
            read.setdefault(document, []).append(one)
    tracer, state = Tracer(lab.store, lambda line: None), lab.registry.state()
    shown = 0
    for place in {*range(0, 10 * len(PLANTED), 10), *range(3, 120, 12), HELD_OUT}:
        document, text = f"manual/{place}", lab.documents[place]
        found = tracer.trace(state, state.get(number), text)
        verbatim = [source for stretch in found.verbatim for source in stretch.sources]
        for source in [*verbatim, *(near.source for near in found.near)]:
            rows = read[source.document]
            lessons = [(x.run.version, s) for x in source.lessons for s in x.steps]
            assert lessons == sorted({(one.version, one.step) for one in rows})
            assert [row for x in source.lessons for row in x.rows] == [
                row for _, row in sorted({(one.version, one.row) for one in rows})
            ]
            assert any(
                (one.shard, one.place) == (source.shard, source.row)
                and source.text.strip("\ufffd") in one.texts[source.document]
                for one in rows
            )
            shown += 1
        if document not in read:
            assert document not in {source.document for source in verbatim}
            assert all(near.source.document != document for near in found.near)
        elif any(one.texts[document].startswith(text) for one in read[document]):
            assert found.verbatim[0].sources[0].document == document and found.share == 1
    assert shown > 50


def test_what_is_only_alike_is_called_near_and_the_rest_nothing(lab: Lab) -> None:
    words = [word for word in lab.said.strip(".").split() if 3 < len(word) < 7]
    near = lab.trace(", ".join(reversed(words)))
    assert near.verdict == "near" and near.near[0].source.document == lab.document
    assert "NEAR" in next(told(near)) and "word for word" in next(told(near))
    nothing = lab.trace("€€€")
    assert nothing.verdict == "nothing found" and "NOTHING FOUND" in next(told(nothing))


def test_a_short_answer_leads_to_documents_about_what_was_asked(lab: Lab, tmp_path: Path) -> None:
    words = " ".join(word for word in lab.said.strip(".").split() if 3 < len(word) < 7)
    settings = JournalSettings(keep="text")
    asked = [one.model_copy(update={"prompt": f"What of {words}?"}) for one in ASKED]
    Journal(tmp_path, lambda: settings).write("one", VERSION, asked, ["\u20ac\u20ac\u20ac"])
    state = lab.registry.state()
    (answer,) = find_answers(state, tmp_path, settings, "one", None, None)
    tracer = Tracer(lab.store, lambda line: None)
    found = tracer.trace(state, answer.version, answer.answer, answer.question)
    assert found.near[0].source.document == lab.document
    assert not tracer.trace(state, answer.version, answer.answer).near


def test_a_long_prompt_leaves_room_for_the_words_of_the_answer(lab: Lab) -> None:
    words = " ".join(word for word in lab.said.strip(".").split() if 3 < len(word) < 7)
    prompt = " ".join(text for text in lab.documents if lab.said not in text)
    tracer, state = Tracer(lab.store, lambda line: None), lab.registry.state()
    found = tracer.trace(state, lab.first, words, prompt)
    assert lab.document in {one.source.document for one in found.near}


def told_of(lab: Lab, text: str, number: int) -> tuple[Trace, Passages]:
    """What `trace` and `explain` say of a text."""
    state = lab.registry.state()
    passages = find_passages(lab.store, state, state.get(number), text)
    return lab.trace(text, state.get(number)), passages


def test_a_text_of_too_many_words_is_looked_for_by_its_spans_alone(lab: Lab) -> None:
    text = f"{'1 ' * 40_000} {lab.said.split()[4]}"
    with pytest.raises(UserError, match=r"40,001 words is too long .* Give a part of it"):
        find_passages(lab.store, lab.registry.state(), lab.first, text)
    found = lab.trace(text)
    assert found.verdict == "near" and found.near
    assert list(told(found))[-1].startswith("Not searched: documents with the whole answer, whose")


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_trace_and_explain_agree_on_every_piece_of_text(lab: Lab, number: int) -> None:
    generator, kinds = random.Random(number), set()
    for _ in range(60):
        words = generator.choice(lab.documents).split()
        size = min(len(words), generator.choice([1, 2, 4, 8, 16, 64]))
        first = generator.randrange(len(words) - size + 1)
        text = generator.choice([" ", "\n  "]).join(words[first : first + size])
        trace, passages = told_of(lab, text, number)

        is_trained = any(document.is_trained for document in passages.documents)
        assert passages.documents, "it stands in the corpus"
        if is_trained:
            assert trace.verdict == "verbatim", text
        if trace.verdict == "verbatim" and trace.share == 1:
            assert is_trained, text
        if trace.verdict == "nothing found":
            assert not is_trained and [str(one) for one in trace.documents] == [
                str(one) for one in passages.documents
            ]
        kinds.add((trace.verdict, is_trained))
    assert {("verbatim", True), ("near", False)} <= kinds


@pytest.mark.fault(
    "endpoint",
    "an answer too short to have a span traced",
    sees="that it was searched for as a whole",
    then="documents that contain it are listed",
)
def test_a_short_text_is_looked_for_as_a_whole_and_that_is_said(lab: Lab) -> None:
    said = min((word for word in lab.said.split() if len(word) > 3), key=len)
    found, passages = told_of(lab, said, 1)
    assert not found.verbatim and found.verdict == "verbatim" and found.share == 1
    lines = list(told(found))
    assert lines[0] == ("VERBATIM: the whole answer occurs in text that version 1 was trained on.")
    assert re.search(r"has [2-7] tokens, fewer than the minimum of 8", lines[1])
    assert any(line.startswith(f"  {lab.document} (manual): trained on") for line in lines)
    nowhere = "Nobody said so"
    found, passages = told_of(lab, nowhere, 1)
    assert found.verdict != "verbatim" and passages.documents == found.documents == []


def test_a_special_tokens_name_and_an_accent_are_found_however_they_are_written(lab: Lab) -> None:
    """A file's name or a PDF has an accent as a character of its own."""
    said = special(PLANTED.index(lab.said))
    apart = unicodedata.normalize("NFD", said)
    assert apart != said
    for text in (said, apart):
        found = find_passages(lab.store, lab.registry.state(), lab.first, text)
        assert [one.document for one in found.documents] == [lab.document]
        trace = lab.trace(text)
        (quoted,) = trace.verbatim
        # A row ends within the name.
        assert "reads <|" in trace.answer[quoted.start : quoted.end]


def test_a_text_is_found_in_the_unicode_form_of_each_corpus_behind_a_version(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    said = "The \ufb01rst valve of all was left \u00bd open, and nobody knows why."
    texts = [f"{said} {text}" for text in tiny_texts()]
    trained = TrainedStore(tmp_path, tiny_model_folder, texts)
    version, store = trained.train(steps=3), trained.store
    newer = Identity(kind="clean_corpus", code_version="1", settings={"unicode_form": "NFKC"})
    made, _ = store.make(newer, lambda draft: write_clean(draft, tiny_texts()))
    lineage = version.lineage | {"clean_corpus": made.fingerprint}
    version = version.model_copy(update={"lineage": lineage})
    state = trained.registry.state()
    assert any(one.is_trained for one in find_passages(store, state, version, said).documents)
    trace = Tracer(store, lambda line: None).trace(state, version, said)
    assert (trace.verdict, trace.percent) == ("verbatim", "100%")


def test_a_part_of_a_document_that_was_not_read_is_not_said_to_be_trained_on(lab: Lab) -> None:
    """Of long documents a run may have taken some rows alone."""
    audit = [one for one in lab.audit if one.version == 1]
    read: dict[str, str] = {}
    for one in audit:
        for document, text in one.texts.items():
            read[document] = read.get(document, "") + text
    for document, text in read.items():
        whole = lab.documents[int(document.removeprefix("manual/"))]
        if (end := " ".join(whole.split()[-12:])) not in " ".join(text.split()):
            break
    trace, passages = told_of(lab, end, 1)
    (held,) = [one for one in passages.documents if one.document == document]
    assert held.lessons and not held.is_trained and "but not in this place" in str(held)
    assert document not in {s.document for one in trace.verbatim for s in one.sources}


@pytest.mark.fault(
    "model_version",
    "text of a version removed by retention, then searched for",
    sees="what removed it, when and why, in both `explain --text` and `trace`",
    then="the text of other versions is searched; `retention.keep` keeps the text of a version",
)
def test_text_that_retention_removed_is_told_as_such(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    lab = Lab(tmp_path, tiny_model_folder)
    lab.train(steps=1)  # Of the newest two the one serves, and to the other one can go back.
    shutil.copytree(lab.store.root, tmp_path / "as it was")
    shards = lab.spec(lab.first).shards_folder.rpartition("/")[2]

    def clean(**keep: tuple[int, ...]) -> None:
        """Remove all but what the newest version needs, as `llm-assets clean --yes` does."""
        settings = PipelineSettings.model_construct(
            retention=RetentionSettings(days=0, versions=1, **keep), forgetting=ForgettingSettings()
        )
        maintenance.clean(lab.record, lab.registry, settings, True, lambda line: None)

    clean()

    # The oldest version's shards went, and its corpus stays, since the newer ones have the same.
    when = rf"tokenized_shards {shards} was removed on 20..-..-.. by `llm-assets clean` \(made "
    found, passages = told_of(lab, lab.said, 1)
    assert found.verdict == "verbatim" and passages.documents[0].is_trained
    assert re.search(when, "\n".join(told(found)))

    corpus = lab.first.lineage["clean_corpus"]
    name = ("clean_corpus", corpus)
    remove(lab.store, [Removal("/".join(name), "nothing needs it", 0, name, explains=True)])
    state = lab.registry.state()
    passages = find_passages(lab.store, state, lab.first, lab.said)
    assert passages.documents == [] and passages.searched == 0
    gone = r"clean_corpus \w+ was removed on 20..-..-.. by `llm-assets clean` \(nothing needs it\)"
    assert re.fullmatch(gone, passages.missing[0])
    with pytest.raises(MissingArtifact, match=rf"{when}.*`retention\.keep` in the pipeline file"):
        lab.trace(lab.said)

    # What the message advises, from the beginning.
    shutil.rmtree(lab.store.root)
    shutil.copytree(tmp_path / "as it was", lab.store.root)
    clean(keep=(1,))
    found, passages = told_of(lab, lab.said, 1)
    assert found.verbatim and not found.missing and not passages.missing


def test_without_a_record_nothing_is_said_to_be_or_not_to_be_trained_on(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    lab = Lab(tmp_path, tiny_model_folder)
    Path(lab.store.folder_url("checkpoint", lab.first.model_fingerprint), TRAINED_NAME).unlink()

    found, passages = told_of(lab, lab.said, 1)

    assert found.verdict != "verbatim"
    assert "version 1: which rows it read is no longer on record" in found.missing
    assert str(passages.documents[0]).endswith(
        "not known whether trained on; no record of version 1"
    )


def test_what_is_indexed_is_not_indexed_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lab.trace(lab.said)
    monkeypatch.setattr(training_text, "_build", None)
    assert lab.trace(lab.said) == first


def test_bad_text_is_refused(lab: Lab, tmp_path: Path) -> None:
    for text in (None, "", " \n"):
        with pytest.raises(UserError, match="no text to trace: give the answer"):
            find_answers(lab.registry.state(), tmp_path, JournalSettings(), None, text, None)
    with pytest.raises(UserError, match="a part"):
        lab.trace("x" * (MOST_CHARACTERS + 1))


def test_a_recorded_answer_without_words_is_traced_to_nothing(lab: Lab, tmp_path: Path) -> None:
    """A model may end at once; other answers to the same request are traced all the same."""
    settings = JournalSettings(keep="text")
    Journal(tmp_path, lambda: settings).write("two", VERSION, ASKED * 2, ["\n", lab.said])
    asked = find_answers(lab.registry.state(), tmp_path, settings, "two", None, None)
    traces = [lab.trace(answer.answer, answer.version) for answer in asked]
    assert [trace.verdict for trace in traces] == ["nothing found", "verbatim"]


def test_the_base_model_has_no_text_here(lab: Lab) -> None:
    with pytest.raises(UserError, match="base model"):
        lab.trace("The valve opens", lab.registry.get(0))


def test_a_request_leads_to_its_answer_where_the_settings_kept_it(lab: Lab, tmp_path: Path) -> None:
    settings = JournalSettings(keep="text", days=1)
    journal = Journal(tmp_path, lambda: settings)
    journal.write("open", VERSION, ASKED, ["the answer"])
    settings = JournalSettings(keep="hashes")
    journal.write("hashed", VERSION, ASKED, ["another answer"])
    settings = JournalSettings(keep="off")
    journal.write("off", VERSION, ASKED, ["unseen"])
    state = lab.registry.state()

    (found,) = find_answers(state, tmp_path, settings, "open", None, None)
    assert (found.version.version, found.answer) == (1, "the answer")
    with pytest.raises(UserError, match=r"Version 1 answered .* with --text"):
        find_answers(state, tmp_path, settings, "hashed", None, None)
    (found,) = find_answers(state, tmp_path, settings, "hashed", "another answer", None)
    assert found.answer == "another answer"
    with pytest.raises(UserError, match="hash differs"):
        find_answers(state, tmp_path, settings, "hashed", "another answer.", None)
    for unknown in ("off", "never"):
        with pytest.raises(UserError, match="of another pipeline, or too old"):
            find_answers(state, tmp_path, settings, unknown, None, None)
    with pytest.raises(UserError, match=r"'open' on record in .*: the id is wrong, of another"):
        find_answers(state, tmp_path / "of another pipeline", settings, "open", None, None)
    kept = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert "another" not in kept and "unseen" not in kept and "the answer" in kept
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*"))


def test_an_expired_answer_is_found_no_more_and_removed_with_the_next(
    lab: Lab, tmp_path: Path
) -> None:
    settings = JournalSettings(keep="text", days=2)
    Journal(tmp_path, lambda: settings).write("old", VERSION, ASKED, ["the answer"])
    (today,) = (tmp_path / "requests").glob("*.jsonl")
    past = today.with_stem("2001-01-01")
    today.rename(past)
    with pytest.raises(UserError, match=r"too old \(answers are kept for 2 days"):
        find_answers(lab.registry.state(), tmp_path, settings, "old", None, None)
    Journal(tmp_path, lambda: JournalSettings(keep="off")).write("new", VERSION, [], [])
    assert not past.exists()
