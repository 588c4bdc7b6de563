"""A forgotten text in what was made before: gone, and everything else as it was."""

import json
import shutil
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.cache import read_cached, write_cached
from artifacts.checkpoints import clear_step, commit
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import MaskedShardSet, ShardSet, list_documents
from artifacts.storage.files import CACHE_VARIABLE
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.rewrite import BEFORE_NAME
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.cli.commands.options import read_text
from llm_assets.cli.session import Session
from llm_assets.cli.text.forget_plan import find_documents
from llm_assets.forgetting import erase as erasing
from llm_assets.forgetting.erase import erase, find_holders
from llm_assets.forgetting.forgotten_list import ForgottenDocument, ForgottenList
from llm_assets.registry.card import page_path
from llm_assets.registry.state import RegistryState
from recipes.evaluation.exam import read_questions
from recipes.spec import BEST_NAME, SPEC_NAME, TrainingSpec
from spark_jobs.clean.decide.decider import DUPLICATE_SCHEMA
from spark_jobs.clean.history import PAST_FOLDER
from spark_jobs.runtime.parquet import write_table
from tests.llm_assets.registry.conftest import entry
from tests.recipes.conftest import settings_of
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.tiny import tiny_shards, tiny_texts
from tests.waiting import WAIT_SECONDS, wait_until

COPY, PAST = "copy of 3", "3 before it was renamed"


def on_record(documents: pa.Table) -> pa.Table:
    """Documents with what else a clean corpus's record says of them."""
    count = len(documents)
    columns = {"split": ["train"] * count, "slice": [0] * count, "source": ["s"] * count}
    for name, values in columns.items():
        documents = documents.append_column(name, [values])
    return documents


class Corpora:
    """A store with a snapshot, a clean corpus without the snapshot's one copy, and shards."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.store = Store(str(folder / "store"))
        self.record = Pipeline(self.store, "manual")
        self.texts = tiny_texts()
        self.ids = [f"text-{number}" for number in range(len(self.texts))]
        raw = self._make("raw_corpus", {}, self._write_raw)
        clean = self._make("clean_corpus", {"raw_corpus": raw.fingerprint}, self._write_clean)
        self._make(
            "tokenized_shards",
            {"clean_corpus": clean.fingerprint},
            lambda draft: draft.stats.update(
                tiny_shards(draft.path, model, self.texts).model_dump()
            ),
        )
        exam = self._make("exam", {"clean_corpus": clean.fingerprint}, self._write_exam)
        self._make("eval_metrics", {"exam": exam.fingerprint}, self._write_evaluation)
        write_cached(self.store.cache, "entry", b"some text")

    def _make(self, kind: str, inputs: dict[str, str], build: Callable[[Draft], None]) -> Artifact:
        made, _ = self.store.make(Identity(kind=kind, code_version="1", inputs=inputs), build)
        self.record.advance(made)
        return made

    def _write_raw(self, draft: Draft) -> None:
        table = pa.table({"id": [*self.ids, COPY], "text": [*self.texts, self.texts[3]]})
        table = table.append_column("source", pa.array(["s"] * len(table)))
        half = len(table) // 2
        for number, part in enumerate((table[:half], table[half:])):
            write_table(f"{draft.url}/part-{number:05d}.parquet", part)

    def _write_clean(self, draft: Draft) -> None:
        table = pa.table({"id": self.ids, "text": self.texts, "text_hash": self.ids})
        write_table(f"{draft.url}/part-00000.parquet", on_record(table))
        left = pa.table({"id": [PAST], "text": [self.texts[3]], "text_hash": ["text-3"]})
        write_table(f"{draft.url}/{PAST_FOLDER}/part-00000.parquet", on_record(left))
        copy = {name: None for name in DUPLICATE_SCHEMA.names}
        copy |= {"id": COPY, "survivor": "text-3", "reason": "exact_duplicate"}
        duplicates = pa.Table.from_pylist([copy], DUPLICATE_SCHEMA)
        write_table(f"{draft.url}/duplicates-00000.parquet", duplicates)
        example = {"id": COPY, "text": self.texts[3][:20]}
        draft.stats["dropped_examples"] = {"exact_duplicate": [example]}

    def _write_exam(self, draft: Draft) -> None:
        """Questions whose passage or what retrieval finds for them is of these documents."""
        pairs = [("text-1", "text-2"), ("text-3", "text-2"), ("text-1", COPY), (None, "text-2")]
        questions = [
            {
                "id": str(number),
                "passage": passage and {"document": passage, "text": passage},
                "retrieved": {"document": found, "text": found},
            }
            for number, (passage, found) in enumerate(pairs)
        ]
        lines = (json.dumps(one) + "\n" for one in questions)
        (draft.path / "questions.jsonl").write_text("".join(lines))

    def _write_evaluation(self, draft: Draft) -> None:
        """With an exam, what models said is to its questions, by their ids."""
        samples = [{"document": str(one), "completion": "It is"} for one in range(4)]
        (draft.path / "samples.json").write_text(json.dumps({"base": samples}))

    listed = ForgottenList(
        documents=[
            ForgottenDocument(
                id="text-3", source="s", text_hash="text-3", by="Ada", reason="asked to"
            )
        ]
    )

    def erase(self) -> list[str]:
        """Forget `text-3`, which is in the train split."""
        said: list[str] = []
        erase(self.record, RegistryState(), self.listed, said.append)
        return said

    def holders(self) -> set[str]:
        """Kinds of artifacts that hold it."""
        found = find_holders(self.record, RegistryState(), self.listed)
        return {one.manifest.kind for one in found}

    def tables_with_it(self, folder: Path) -> list[Path]:
        tables = {path: pq.read_table(path) for path in folder.rglob("*.parquet")}
        with_text = {path: one for path, one in tables.items() if "text" in one.column_names}
        return [p for p, one in with_text.items() if self.texts[3] in one["text"].to_pylist()]

    def current(self, kind: str) -> Artifact:
        return self.record.current(kind, needed_by="test")

    def ids_of(self, kind: str) -> list[str]:
        parts = sorted(self.current(kind).path.glob("part-*.parquet"))
        return [one for part in parts for one in pq.read_table(part)["id"].to_pylist()]

    def shards(self) -> tuple[Path, ShardStats]:
        made = self.current("tokenized_shards")
        return made.path, ShardStats.model_validate(made.stats)


@pytest.fixture
def corpora(tmp_path: Path, tiny_model_folder: Path) -> Corpora:
    return Corpora(tmp_path, tiny_model_folder)


def test_the_text_is_in_no_snapshot_corpus_or_shard_and_in_no_cache(corpora: Corpora) -> None:
    folder, stats = corpora.shards()
    every = np.arange(len(ShardSet(folder, stats, "train")))
    masked = MaskedShardSet(folder, stats, ["text-3"], "train").read(every)
    order = ShardSet(folder, stats, "train").read(every).segments.tolist()

    every_kind = {"raw_corpus", "clean_corpus", "tokenized_shards", "exam", "eval_metrics"}
    assert corpora.holders() == every_kind

    said = corpora.erase()

    assert not corpora.holders()
    assert sum("rewritten without" in line for line in said) == 5, said
    assert not corpora.tables_with_it(Path(corpora.store.root))
    assert corpora.ids_of("raw_corpus") == [one for one in corpora.ids if one != "text-3"]
    assert corpora.ids_of("clean_corpus") == corpora.ids_of("raw_corpus")
    assert corpora.current("clean_corpus").stats["dropped_examples"] == {"exact_duplicate": []}
    folder, stats = corpora.shards()
    erased = ShardSet(folder, stats, "train")
    assert (erased.read(every).tokens == masked.tokens).all()
    assert erased.read(every).segments.tolist() == order
    assert stats.erased == ["text-3"]
    assert "text-3" not in list_documents(erased)["text_hash"].to_pylist()
    assert read_cached(corpora.store.cache, "entry") is None
    questions = read_questions(corpora.current("exam").path)
    assert [question["id"] for question in questions] == ["0", "3"]
    evaluation = corpora.current("eval_metrics").path
    samples = json.loads((evaluation / "samples.json").read_text())
    assert [one["document"] for one in samples["base"]] == ["0", "3"]
    for kind in every_kind:
        artifact = corpora.current(kind)
        artifact.verify()
        assert artifact.manifest.provenance["rewritten"][0]["reason"] == "texts were forgotten"


def test_erasing_again_writes_nothing(corpora: Corpora) -> None:
    corpora.erase()
    before = [corpora.current(kind).manifest for kind in ("raw_corpus", "tokenized_shards")]
    assert not any("rewritten without" in line for line in corpora.erase())
    assert before == [corpora.current(kind).manifest for kind in ("raw_corpus", "tokenized_shards")]


def test_it_is_erased_from_what_a_trial_of_other_settings_made(corpora: Corpora) -> None:
    identity = Identity(kind="clean_corpus", code_version="1", settings={"tried": True}, inputs={})
    made, _ = corpora.store.make(identity, corpora._write_clean)
    Pipeline(corpora.store, "manual", layout.trial_record("manual", "0123")).advance(made)
    corpora.erase()
    assert not corpora.tables_with_it(made.path)


def test_an_unfinished_training_that_may_have_read_it_begins_again(corpora: Corpora) -> None:
    """What it has saved may have learnt the text, of which its records will say nothing."""
    shards = corpora.current("tokenized_shards")
    root = Path(corpora.store.root)
    settings, inputs = settings_of(), {"tokenized_shards": shards.fingerprint}
    for name, masked in (("read", ()), ("masked", ("text-3",)), ("done", ())):
        spec = TrainingSpec(
            run_id=name,
            shards_folder=shards.url,
            shards=ShardStats.model_validate(shards.stats),
            base_model_folder="model",
            run_folder=f"{root}/{layout.run(name)}",
            export_folder="",
            training=settings,
            masked=masked,
            inputs=inputs,
        )
        spec.write(root / layout.run(name) / SPEC_NAME)
        (root / layout.run(name) / BEST_NAME / "step-2").mkdir(parents=True)
        clear_step(spec.run_folder, 2)
        commit(spec.run_folder, 2, spec.content(), {})
    done = root / layout.artifact("checkpoint", "done")
    shutil.copytree(corpora.current("exam").path, done)

    said = corpora.erase()

    left = {path.parent.name for path in (root / "runs").glob("*/step-2")}
    assert left == {"masked", "done"}
    assert not (root / layout.run("read") / BEST_NAME).exists()
    assert "Training run read, which is not finished, begins again without the text." in said
    assert not any("begins again" in line for line in corpora.erase())


def test_nothing_of_it_stays_in_what_was_set_aside_or_never_finished(corpora: Corpora) -> None:
    raw = corpora.current("raw_corpus")
    corpora.store.set_aside(f"raw_corpus/{raw.fingerprint}")
    root = Path(corpora.store.root)
    identity = Identity(kind="raw_corpus", code_version="1", inputs={"source": "newer"})

    def killed(draft: Draft) -> None:
        corpora._write_raw(draft)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpora.store.make(identity, killed)
    assert {path.relative_to(root).parts[0] for path in root.rglob("part-00001.parquet")} == {
        *("damaged", "drafts"),
    }
    corpora.erase()
    assert not list(root.rglob("part-00001.parquet"))


def test_in_a_bucket_unfinished_text_goes_and_the_endpoint_stays(
    google: LocalGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs in the cloud write in place; beside this machine's caches are its endpoint's files."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    store = Store(f"gs://{BUCKET}/stores/{uuid.uuid4().hex}")
    whole, left, running = "a" * 20, "b" * 20, "c" * 20
    made, _ = store.make(
        Identity(kind="clean_corpus", code_version="1", inputs={}),
        lambda draft: write_table(f"{draft.url}/part-0.parquet", pa.table({"id": ["other"]})),
    )
    part = "prepared/part-0.parquet"
    gone = [f"raw_corpus/{left}/{part}", f"clean_corpus/{left}.scratch/{part}"]
    gone.append(f"clean_corpus/{made.fingerprint}.scratch/{part}")
    kept = [f"clean_corpus/{running}/{part}", f"clean_corpus/{running}.scratch/{part}"]
    # Another pipeline's, whose rewriting was ended and goes on when it is called again.
    kept += [f"pipelines/{whole}/{part}", f"raw_corpus/{whole}/{BEFORE_NAME}"]
    kept.append(f"clean_corpus/{made.fingerprint}/part-0.parquet")
    for place in (*gone, *kept[:4]):
        store.write_bytes(place, b"text")
    server = store.machine_root / layout.endpoint("manual") / "status.json"
    text = Path(store.machine_cache) / "texts"
    for file in (server, text):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")

    with store.lease(layout.artifact_lease("clean_corpus", running)):
        erase(Pipeline(store, "manual"), RegistryState(), Corpora.listed, lambda line: None)

    assert [place for place in (*gone, *kept) if store.has_file(place)] == kept
    assert server.exists() and not text.exists()


def test_pages_about_versions_go_since_they_show_what_was_asked(corpora: Corpora) -> None:
    state = RegistryState()
    page = Path(corpora.store.root, page_path("manual", state.register(entry("a")).version))
    page.parent.mkdir(parents=True)
    page.write_text("It is made in Riga.")
    erase(corpora.record, state, corpora.listed, lambda line: None)
    assert not page.exists()


def test_killed_halfway_nobody_reads_half_of_it_and_the_next_call_goes_on(
    corpora: Corpora, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = erasing._filtered

    def killed(parquet: pq.ParquetFile, ids: pa.Array) -> bytes:
        if corpora.store.exists("raw_corpus", raw.fingerprint):
            return whole(parquet, ids)
        raise KeyboardInterrupt

    raw = corpora.current("raw_corpus")
    monkeypatch.setattr(erasing, "_filtered", killed)
    with pytest.raises(KeyboardInterrupt):
        corpora.erase()
    assert corpora.record.find_current("raw_corpus") is None
    assert (Path(raw.url) / BEFORE_NAME).exists()

    monkeypatch.undo()
    corpora.erase()

    corpora.current("raw_corpus").verify()
    assert corpora.ids_of("raw_corpus") == [one for one in corpora.ids if one != "text-3"]
    assert not (Path(raw.url) / BEFORE_NAME).exists()


def test_two_at_once_leave_whole_artifacts_without_the_texts_of_both(
    corpora: Corpora, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, begun, go_on = erasing._filtered, threading.Event(), threading.Event()

    def filtered(parquet: pq.ParquetFile, ids: pa.Array) -> bytes:
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        return whole(parquet, ids)

    monkeypatch.setattr(erasing, "_filtered", filtered)
    (entry,) = corpora.listed.documents
    last = entry.model_copy(update={"id": corpora.ids[-1], "text_hash": corpora.ids[-1]})
    both, said = ForgottenList(documents=[entry, last]), list[str]()
    first = threading.Thread(target=corpora.erase)
    second = threading.Thread(
        target=erase, args=(corpora.record, RegistryState(), both, said.append)
    )
    first.start()
    assert begun.wait(WAIT_SECONDS)
    second.start()
    with suppress(AssertionError):
        wait_until(lambda: said)
    go_on.set()
    for thread in (first, second):
        thread.join()
    for kind in ("raw_corpus", "clean_corpus", "tokenized_shards"):
        corpora.current(kind).verify()
    assert corpora.ids_of("raw_corpus") == [one for one in corpora.ids[:-1] if one != "text-3"]
    assert said[0].startswith("waiting for ")


def test_ids_are_read_from_a_file_as_windows_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_bytes("a.md\r\nb c.md\r\n".encode("utf-8-sig"))
    session = SimpleNamespace(record=None)
    assert find_documents(cast(Session, session), read_text(path).splitlines(), None) == [
        "a.md",
        "b c.md",
    ]


def test_a_source_is_all_that_it_ever_gave(corpora: Corpora) -> None:
    """What has left it and what cleaning dropped, as well."""
    session = SimpleNamespace(record=corpora.record, settings=SimpleNamespace(name="manual"))
    named = find_documents(cast(Session, session), [], "s")
    assert set(named) == {*corpora.ids, COPY, PAST}
