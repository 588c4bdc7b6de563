"""Derived text on its way: cleaned, trained on beside its documents, traced to them, forgotten with
them."""

import pyarrow.parquet as pq
import pytest

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import Shard, ShardFiles
from llm_assets.forgetting.erase import find_holders
from llm_assets.forgetting.forgotten_list import read_list
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.card import CHOSEN
from tests.conftest import Project
from tests.llm_assets.forgetting.conftest import documents_of
from tests.llm_assets.in_process import ProjectHere, ask
from tests.tiny import story

DEVICES = [first + last for first in ("vel", "ost", "mir") for last in ("ora", "rin", "row", "ulm")]


def ids_in_shards(project: Project) -> set[str]:
    """The documents of the training split."""
    shards = project.record.current("tokenized_shards", "test")
    stats, files = ShardStats.model_validate(shards.stats), ShardFiles(shards.path)
    opened = (Shard(files, entry, stats) for entry in stats.shards if entry.split == "train")
    return {name for shard in opened for name in shard.documents(["id"])["id"].to_pylist()}


@pytest.fixture
def studied(project: Project) -> Project:
    """A project whose text has facts, with its shards."""
    for device in DEVICES:
        lines = (f"{name}: {device}{name.lower()}" for name in ("Weight", "Color", "Town"))
        page = f"# The {device}\n\n{story(device)}\n\n" + "\n".join(lines)
        (project.folder / "text" / f"{device}.md").write_text(page)
    project.configure(study={"forms_per_fact": 4}, tokenized_shards={"mixing": {"study": {}}})
    assert ask(project, "*tokenized_shards") == ""
    return project


def test_derived_text_is_trained_on_traced_to_its_document_and_forgotten_with_it(
    studied: Project,
) -> None:
    corpus, derived = documents_of(studied), documents_of(studied, "study")
    pages = {name for name in corpus if name.endswith(".md")}
    trained = {name for name in pages if corpus[name]["split"] == "train"}
    assert trained < pages, "some of the pages are held out"
    documents = {name.partition("#study/")[0] for name in derived}
    assert documents == trained and {row["split"] for row in derived.values()} == {"train"}
    assert derived.keys() <= ids_in_shards(studied)
    shards = studied.record.current("tokenized_shards", "test")
    study = studied.record.current("study", "test")
    assert shards.manifest.inputs["study"] == study.fingerprint
    assert study.stats[CHOSEN] == study.manifest.settings | {"facts": None}
    assert shards.stats["tokens_by_source"]["study"] > 0

    here = ProjectHere(studied)
    name, row = next(iter(derived.items()))
    document = name.partition("#study/")[0]
    said = here.say("document", name)
    assert f"made from {document}: its facts in other forms" in " ".join(said.split())

    asked = ("forget", document, "--name", "Ada", "--reason", "asked to", "--similar", "drop")
    said = here.say(*asked)
    assert f"with it, a text made from it: {name}" in " ".join(said.split())
    here.say(*asked, "--yes")
    assert row["text_hash"] in read_list(studied.record.store, "manual").texts
    listed = read_list(studied.record.store, "manual")
    assert all(one.signature for one in listed.active if one.survivor == document)
    (certificate,) = (studied.folder / "store" / "forgotten" / "manual").glob("*.json")
    said = " ".join(here.say("verify", str(certificate)).split())
    assert f"{len(listed.texts)} texts were looked for" in said and "UNKNOWN" not in said
    left = documents_of(studied, "study")
    assert left and not any(one.startswith(f"{document}#study/") for one in left)
    state = LocalRegistry.of(studied.record).state()
    assert find_holders(studied.record, state, read_list(studied.record.store, "manual")) == []
    device = document.removesuffix(".md")
    for path in (studied.folder / "store" / "study").rglob("*.parquet"):
        texts = [one.get("text", "") for one in pq.read_table(path).to_pylist()]
        assert f"{device}weight" not in "".join(texts), path

    assert ask(studied, "*tokenized_shards") == ""
    again = documents_of(studied, "study")
    assert again.keys() == left.keys(), "what was forgotten is not made again"
