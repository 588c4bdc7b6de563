"""The quality filters really run: prose passes them, each kind of junk goes for its reason."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.clean.prepare import quality_filter
from spark_jobs.settings import CleanCorpusSettings, QualityFilter
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.jobs import clean_corpus

PROSE = (
    "The pump in the cellar of the old mill has to be started by hand. Before that, the valve on "
    "the left is opened and the water is let in, which takes about four minutes. Nobody should "
    "stand below the wheel while it turns. When the pressure has reached two bar, the clutch can "
    "be closed and the mill begins to work with its full power. In the evening all of this is "
    "done in the other order, and what was noticed is written into the book that lies on the "
    "table. Whoever finds a leak tells the keeper of the mill at once."
)
JUNK: dict[QualityFilter, dict[str, str]] = {
    "gopher_quality": {
        "gopher_short_doc": "Far too short to be judged.",
        "gopher_below_alpha_threshold": PROSE + " 17042 23011" * 60,
    },
    "gopher_repetition": {"dup_line_frac": "\n".join([PROSE, *["Next page of the book."] * 9])},
    "c4": {
        "curly_bracket": PROSE + "\nif (open) { close(valve); } else it is closed.",
        "too_few_sentences": "One sentence only.",
    },
    "fineweb": {"line_punct_ratio": "\n".join(f"Menu entry number {n}" for n in range(40))},
}


@pytest.mark.parametrize("name", JUNK)
def test_prose_passes_and_junk_goes_for_its_reason(name: QualityFilter) -> None:
    judge = quality_filter(name)

    assert judge(PROSE) is None
    for reason, text in JUNK[name].items():
        assert judge(text) == f"{name}:{reason}"


def test_what_each_rule_dropped_is_counted(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    menu = JUNK["fineweb"]["line_punct_ratio"]
    code = JUNK["c4"]["curly_bracket"]
    settings = CleanCorpusSettings(minimum_characters=1, quality_filters=["fineweb", "c4"])
    raw = raw_corpus([("prose", PROSE), ("code", code), ("menu1", menu), ("menu2", menu + "!")])

    stats = clean_corpus(spark, raw, tmp_path / "clean", settings)

    assert stats["dropped"] == {"c4:curly_bracket": 1, "fineweb:line_punct_ratio": 2}
    assert stats["dropped_bytes"]["c4:curly_bracket"] == len(code.encode())
