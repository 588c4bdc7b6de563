"""The cleaning job, through its own door: folders in, folders and counts out."""

import ipaddress
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from spark_jobs.clean.prepare import mask_personal_data
from spark_jobs.settings import CleanCorpusSettings, NearDuplicateSettings
from spark_jobs.text import fold, text_hash
from tests.spark_jobs.conftest import Corpus, spark_settings
from tests.spark_jobs.jobs import clean_corpus, clean_documents
from tests.tiny import tiny_texts

SETTINGS = CleanCorpusSettings(minimum_characters=40, maximum_characters=5_000)


Clean = Callable[..., dict]


@pytest.fixture
def clean(spark: SparkSession, raw_corpus: Corpus, tmp_path: Path) -> Clean:
    """Cleans `(id, text)` pairs into a folder; gives the stats."""

    def run(
        documents: list[tuple[str, str]],
        settings: CleanCorpusSettings = SETTINGS,
        name: str = "clean",
        **options: object,
    ) -> dict:
        return clean_corpus(spark, raw_corpus(documents), tmp_path / name, settings, **options)

    return run


def test_every_dropped_document_is_counted_under_its_reason(clean: Clean, tmp_path: Path) -> None:
    text = "A valve opens before start-up and closes at the end of the week."
    stats = clean(
        [
            ("kept", text),
            ("copy", text.upper().replace(" ", "  ")),
            ("control", "\x00\x07 "),
            ("short", "A pump."),
            ("long", "word " * 2_000),
        ]
    )

    # `copy` is longer once its spaces count, so it survives.
    assert clean_documents(tmp_path / "clean").keys() == {"copy"}
    assert stats["dropped"] == {"empty": 1, "exact_duplicate": 1, "too_long": 1, "too_short": 1}
    assert stats["documents"] + sum(stats["dropped"].values()) == stats["documents_read"] == 5


@pytest.mark.fault(
    "clean_corpus",
    "text with NULs, half surrogate pairs or a wrong encoding",
    sees="how many such documents there are",
    then="control characters are removed and the encoding is repaired; everything else stays",
)
def test_documents_whose_characters_were_repaired_or_lost_are_counted(
    clean: Clean, tmp_path: Path
) -> None:
    texts = {
        "sound": "A valve opens before start-up, na\u00efve as it is.",
        "lines": "A pump turns\x85slowly at 40 \u00b0C, and \r\nthen it ends.",
        "nul": "A gauge is\x00 replaced by the operator every week.",
        "half": "No motor \ufffd fails when the lamp is red and no one looks.",
        "encoding": "The caf\u00c3\u00a9 of the north hall is checked before start-up.",
    }

    stats = clean(list(texts.items()))

    found = clean_documents(tmp_path / "clean")
    assert stats["repaired"] == 3 and found.keys() == texts.keys()
    assert found["lines"]["text"].splitlines()[0] == "A pump turns"
    assert found["nul"]["text"] == texts["nul"].replace("\x00", "")


def test_the_survivor_is_the_longest_then_the_smallest_id_under_any_partitioning(
    spark: SparkSession, clean: Clean, tmp_path: Path
) -> None:
    originals = tiny_texts(60)
    copies = [
        (f"{number:03d}-{copy}", text if copy else text.replace(". ", ".  "))
        for number, text in enumerate(originals)
        for copy in "abc"[: 1 + number % 3]
    ]
    expected = {}
    for identifier, text in sorted(copies):
        number = identifier[:3]
        if number not in expected or len(text) > len(expected[number][1]):
            expected[number] = (identifier, text)

    found = []
    for seed, partitions in ((0, 1), (1, 5)):
        random.Random(seed).shuffle(copies)
        with spark_settings(spark, shuffle__partitions=partitions):
            clean(copies, name=f"clean-{partitions}")
        found.append(clean_documents(tmp_path / f"clean-{partitions}"))

    assert found[0] == found[1]
    assert found[0].keys() == {identifier for identifier, _ in expected.values()}


@pytest.mark.parametrize(
    ("texts", "filters", "said"),
    [
        (["x", "y"], [], r"\(too_short: 2\). .*, or lower \S+minimum_characters` \(now 40\).$"),
        (["z " * 3_000], [], r"\(too_long: 1\). .*, or raise \S+maximum_characters` \(now 5000"),
        (["z " * 50], ["c4"], r"\(c4:\w+: 1\). .*, or take filters out of \S+quality_filters`.$"),
    ],
)
def test_a_corpus_with_nothing_left_says_what_was_dropped_and_which_setting_keeps_more(
    clean: Clean, texts: list[str], filters: list[str], said: str
) -> None:
    settings = SETTINGS.model_copy(update={"quality_filters": filters})
    with pytest.raises(UserError, match=said):
        clean([(str(number), text) for number, text in enumerate(texts)], settings)


def test_a_missing_corpus_and_a_missing_column_are_named(
    spark: SparkSession, tmp_path: Path, raw_corpus: Corpus
) -> None:
    with pytest.raises(UserError, match=r"raw_corpus.*dagster asset materialize"):
        clean_corpus(spark, tmp_path / "absent", tmp_path / "clean", SETTINGS)

    raw = Path(raw_corpus([("a", "x" * 50)]))
    with pytest.raises(UserError, match=r"absent holds no part-\*.parquet"):
        clean_corpus(spark, raw, tmp_path / "clean", SETTINGS, earlier=tmp_path / "absent")
    file = raw / "part-00000.parquet"
    pq.write_table(pq.read_table(file).drop_columns("source"), file)
    with pytest.raises(UserError, match=r"part-00000.parquet.*no column 'source'"):
        clean_corpus(spark, raw, tmp_path / "clean", SETTINGS)


def test_a_near_copy_is_dropped_with_its_reason_and_cluster(clean: Clean, tmp_path: Path) -> None:
    original = " ".join(f"word{number}" for number in range(120))
    copy = original.replace("word60", "changed") + " appendix"

    others = [("c", original.upper()), ("d", "z " * 60), ("e", "z")]
    stats = clean([("a", original), ("b", copy), *others])

    assert clean_documents(tmp_path / "clean").keys() == {"b", "d"}
    assert stats["dropped"] == {"exact_duplicate": 1, "near_duplicate": 1, "too_short": 1}
    assert stats["cluster_sizes"] == {"1": 1, "3": 1}
    listed = pq.read_table(tmp_path / "clean" / "duplicates-00000.parquet").to_pylist()
    assert [(row["id"], row["survivor"], row["reason"], row["neighbor"]) for row in listed] == [
        ("a", "b", "near_duplicate", "b"),
        ("c", "b", "exact_duplicate", "a"),
    ]
    assert 0.8 <= listed[0]["similarity"] < 1 == listed[1]["similarity"]
    dropped = pq.read_table(tmp_path / "clean" / "dropped-00000.parquet").to_pylist()
    assert dropped == [{"id": "e", "reason": "too_short", "cluster": None}]
    cluster = min(text_hash(fold(text)) for text in (original, copy))
    assert {row["cluster"] for row in listed} == {cluster}
    assert clean_documents(tmp_path / "clean")["b"]["cluster"] == cluster


@pytest.mark.parametrize(
    ("near_duplicates", "kept"),
    [
        ({}, {"a", "edited", "reversed"}),
        ({"threshold": 0.65}, {"a", "reversed"}),
        ({"shingle_words": 1}, {"a"}),
        ({"enabled": False}, {"a", "edited", "near", "reversed"}),
    ],
)
def test_the_settings_say_what_is_a_near_copy(
    near_duplicates: dict[str, object], kept: set[str], clean: Clean, tmp_path: Path
) -> None:
    words = [f"word{number}" for number in range(120)]
    text = " ".join(words)
    edited = text
    for number in (20, 50, 80, 110):
        # Each takes five of 116 shingles of five words, and adds as many others.
        edited = edited.replace(f"word{number} ", "changed ")
    documents = [
        # The longest stays.
        ("a", f"{text} {' '.join(words[:3])}"),
        ("edited", edited),
        ("near", text.replace("word60", "changed")),
        ("reversed", " ".join(reversed(words))),
    ]
    settings = NearDuplicateSettings.model_validate(near_duplicates)

    clean(documents, SETTINGS.model_copy(update={"near_duplicates": settings}))

    assert clean_documents(tmp_path / "clean").keys() == kept


def test_copies_and_what_repeats_evaluation_texts_are_found_also_where_no_space_parts_words(
    clean: Clean, tmp_path: Path
) -> None:
    draw = random.Random(1).choices
    manual, unspaced, other = ("".join(map(chr, draw(range(0x4E00, 0x9000), k=90))) for _ in "abc")
    spaced = " ".join(f"question{number}" for number in range(30))
    asked = (spaced, "a\u2028b", unspaced)
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in asked]
    (tmp_path / "sets.jsonl").write_text("\n".join(lines))
    stats = clean(
        [
            ("a", manual),
            ("b", f"{manual[:40]}\u4e00{manual[41:]}\u4e01"),
            ("c", f"\u4e02{unspaced}\u4e03"),
            ("d", other),
            ("e", f"Answered: {spaced}. Indeed."),
            ("f", "other words " * 30),
        ],
        evaluation_texts=[str(tmp_path / "sets.jsonl")],
    )
    assert stats["dropped"] == {"overlaps_evaluation": 2, "near_duplicate": 1}
    assert clean_documents(tmp_path / "clean").keys() == {"b", "d", "f"}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("请联系info@example.cn获取帮助。", "请联系MAIL获取帮助。"),
        ("問い合わせはtaro@example.co.jpまで", "問い合わせはMAILまで"),
        ("info@naver.com으로 보내세요", "MAIL으로 보내세요"),
        ("<jürgen@firma.de>, info@müller.de.", "<MAIL>, MAIL."),
        ("иван@почта.рф или mailto:o'neil+pump@a-b.co.uk", "MAIL или mailto:MAIL"),
        ("地址是8.8.8.8:53。", "地址是ADDRESS:53。"),
        ("From 8.8.8.8-9.9.9.9.", "From ADDRESS-ADDRESS."),
        ("Help...help@acme.org, **u@x.org**", "Help...MAIL, **MAIL**"),
        ("|u@x.org| `u@x.org`", "|MAIL| `MAIL`"),
        ("https://user@acme.org/x bob@acme.org2 root@10.1.2.3", "https://MAIL/x MAIL MAIL"),
        ("Server.....8.8.8.8 and _8.8.8.8_", "Server.....ADDRESS and _ADDRESS_"),
        ("OID 1.3.6.1.4.1.311.21.20, section 12.1.2.33.4, v1.2.3.4567", None),
        ("12.34.56.789 and 10.0.0.1 and 1.2.3.04", None),
        ("react@18.2.0 lodash@4.17.21 git@github.com:org/pump.git @decorator.name", None),
        ("Ping 2001:4860:4860::8888: it answers.", "Ping ADDRESS6: it answers."),
        ("[2606:4700::1111]:443, IP:2620:fe::fe/64", "[ADDRESS6]:443, IP:ADDRESS6/64"),
        ("Source:2A00:1450:4001:82b:0:0:0:200e.", "Source:ADDRESS6."),
        ("地址是2001:4860:4860::8888。 2606:4700:4700::", "地址是ADDRESS6。 ADDRESS6"),
        ("::ffff:8.8.8.8 64:ff9b::8.8.8.8", "::ffff:ADDRESS 64:ff9b::ADDRESS"),
        ("::1 fe80::1ff:fe23:4567:890a fd12:3456:789a::1 2001:db8::2 3fff::a:1 ff02::1", None),
        ("12:30:45 2031:03:14 2031:03:14:12:30:45 20:1a:2b:3c:4d:5e 2000:3b:00.0", None),
        ("std::vector<int> 3ds::add::face x[2000::2] x[2000:3000:2] 2000:0100", None),
        ("20:1a:2b:3c:4d:5e:6f:70 2a:1b:3c:4d:5e:6f:70:81:92:a3:b4:c5:d6:e7:f8:09", None),
        ("2001:4860:4860:0:0:0:0:8888:1 face:2001:4860:4860::8888 2001:48601:1::2", None),
    ],
)
def test_addresses_are_masked_in_text_of_any_script_and_versions_are_not(
    text: str, masked: str | None
) -> None:
    expected = (masked or text).replace("MAIL", "email@example.com")
    expected = expected.replace("ADDRESS6", "2001:db8::1").replace("ADDRESS", "192.0.2.1")
    assert mask_personal_data(text) == expected


@given(
    # With three groups at least that are not 0.
    number=st.integers(0x2 << 124, (0x4 << 124) - 1).map(lambda number: number | 1 << 96 | 1),
    short=st.booleans(),
    around=st.sampled_from(["{}", "[{}]:443", "a {}, b", "IP:{}.", "{}/64", "<{}>", "对{}对"]),
)
def test_every_public_address_of_ipv6_is_masked_and_no_other(
    number: int, short: bool, around: str
) -> None:
    address = ipaddress.IPv6Address(number)
    said = around.format(address.compressed if short else address.exploded)
    example = around.format("2001:db8::1")
    assume(not any(address in ipaddress.ip_network(one) for one in ("2001:db8::/32", "3fff::/20")))
    assert mask_personal_data(said) == example
    assert mask_personal_data(example) == example
    private = ipaddress.IPv6Address(number | 0xF << 124)
    assert mask_personal_data(around.format(private)) == around.format(private)


@given(
    st.lists(st.text("0123456789abcDEF", min_size=1, max_size=4), min_size=1, max_size=20),
    st.sampled_from(["::", ":", " ", "-"]),
)
def test_runs_of_hexadecimal_digits_that_are_no_address_are_not_masked(
    groups: list[str], between: str
) -> None:
    text = between.join(groups)
    try:
        ipaddress.ip_address(text)
    except ValueError:
        assert mask_personal_data(text) == text


@pytest.mark.soak
def test_a_document_of_200_mb_is_dropped_for_its_length(clean: Clean, tmp_path: Path) -> None:
    sentence = "The valve opens before start-up and closes every week. "
    huge = sentence * (200_000_000 // len(sentence))

    stats = clean([("huge", huge), ("sound", sentence * 3)])

    assert stats["dropped"] == {"too_long": 1}
    assert clean_documents(tmp_path / "clean").keys() == {"sound"}
