"""`llm-assets gate` on two files of lm-eval's samples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from artifacts.errors import UserError
from llm_assets.cli.main import commands
from recipes.evaluation.harness import write_task

Lines = list[dict[str, Any]]


def samples(share: float, seed: int = 0, count: int = 200) -> Lines:
    """Lines as lm-eval writes them, right so often."""
    right = np.random.default_rng(seed).random(count) < share
    return [
        {
            "doc_id": number,
            "doc": {"question": f"What\u2028is {number}\x85?"},
            "target": "0",
            "filter": "none",
            "metrics": ["acc"],
            "doc_hash": f"hash of {number}",
            "acc": float(one),
        }
        for number, one in enumerate(right)
    ]


def judge(folder: Path, candidate: Lines, incumbent: Lines, *options: str) -> Result:
    paths = []
    for name, lines in (("new", candidate), ("old", incumbent)):
        paths.append(folder / name / "samples_sums_2026-06-11T10-20-30.123456.jsonl")
        paths[-1].parent.mkdir(exist_ok=True)
        written = (json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        paths[-1].write_text("".join(written))
    return CliRunner().invoke(commands, ["gate", *map(str, paths), *options])


@pytest.mark.parametrize(("share", "code"), [(0.7, 0), (0.42, 3), (0.1, 3)])
def test_the_exit_code_says_whether_the_candidate_is_better(
    tmp_path: Path, share: float, code: int
) -> None:
    judged = judge(tmp_path, samples(share, seed=1), samples(0.4), "--json")
    assert judged.exit_code == code, judged.output
    told = json.loads(judged.stdout)
    assert told["promoted"] is (code == 0)
    assert told["metric"] == "acc" and told["comparison"]["clusters"] == 200
    assert told["comparison"]["task"] == "sums"
    words = judge(tmp_path, samples(share, seed=1), samples(0.4)).output
    assert "On sums the candidate differs in acc scores from the incumbent by" in words
    assert words.startswith("better. " if code == 0 else "not shown to be better. ")


def test_many_comparisons_ask_for_more(tmp_path: Path) -> None:
    new, old = samples(0.6, seed=1), samples(0.4)
    assert judge(tmp_path, new, old).exit_code == 0
    assert judge(tmp_path, new, old, "--look", "100000").exit_code == 3


def test_likelihoods_are_judged_in_bits_per_byte(tmp_path: Path) -> None:
    new, old = ([line | {"bits_per_byte": [ll, 40]} for line in samples(1.0)] for ll in (-20, -30))
    for at, line in enumerate(new):
        line["bits_per_byte"] = [-20.0 - at % 3, 40]
    judged = judge(tmp_path, new, old, "--metric", "bits_per_byte", "--json")
    assert judged.exit_code == 0
    compared = json.loads(judged.stdout)["comparison"]
    assert compared["difference"] == pytest.approx(-9.005 / 40 / np.log(2))
    assert compared["unit"] == "bits per byte" and not compared["higher_is_better"]
    assert judge(tmp_path, old, new, "--metric", "bits_per_byte").exit_code == 3


def test_a_perplexity_of_answers_is_better_where_their_likelihoods_are_higher(
    tmp_path: Path,
) -> None:
    """LAMBADA's samples have log-likelihoods under that name."""
    new, old = (
        [line | {"perplexity": ll - at % 3 * odd} for at, line in enumerate(samples(1.0))]
        for ll, odd in ((-2.0, 0), (-3.0, 0.1))
    )
    options = ("--metric", "perplexity", "--lower-is-better", "--json")
    judged = judge(tmp_path, new, old, *options)
    assert judged.exit_code == 0, judged.output
    compared = json.loads(judged.stdout)["comparison"]
    assert compared["unit"] == "bits per answer" and not compared["higher_is_better"]
    assert compared["difference"] == pytest.approx(-1.0995 / np.log(2))
    assert judge(tmp_path, old, new, *options).exit_code == 3


def test_of_several_filters_one_is_chosen_and_lower_may_be_better(tmp_path: Path) -> None:
    new, old = (
        [line | {"filter": name} for line in samples(share, seed) for name in ("strict", "loose")]
        for share, seed in ((0.2, 1), (0.8, 0))
    )
    with pytest.raises(UserError, match=r"several filters \(strict, loose\)"):
        raise judge(tmp_path, new, old).exception or AssertionError
    assert judge(tmp_path, new, old, "--filter", "strict").exit_code == 3
    assert judge(tmp_path, new, old, "--filter", "loose", "--lower-is-better").exit_code == 0


def test_copies_of_a_question_and_few_questions_decide_nothing(tmp_path: Path) -> None:
    new, old = samples(1.0), samples(0.0)
    few = judge(tmp_path, new[:29], old[:29])
    assert few.exit_code == 3 and "asked only 29 different questions;" in few.output
    copies = [line | {"doc_hash": "one", "doc_id": at} for at, line in enumerate(new)]
    assert judge(tmp_path, copies, [c | {"acc": 0.0} for c in copies]).exit_code == 3
    lost = judge(
        tmp_path,
        new[:100] + [c | {"acc": 0.0} for c in copies[100:]],
        old[:100] + copies[100:],
        "--json",
    )
    assert json.loads(lost.stdout)["comparison"]["difference"] == pytest.approx(99 / 101)


def rename(lines: Lines) -> Lines:
    return [line | {"doc_hash": "another"} for line in lines]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:150], "lacks 50 questions.*such as doc_id 150: it was cut"),
        (rename, "line 1 and .*line 1: doc_id 0 is a different question"),
        (lambda lines: lines + lines[:1], "line 201 answers the question 0 again, after .*line 1"),
        (lambda lines: [], "is empty. Give a file samples_TASK_TIME.jsonl"),
        (lambda lines: [{"text": "a"}], "line 1 is not a sample: it has no `doc_id`"),
        (lambda lines: ["a list"], "line 1 is not a sample"),
        (lambda lines: [{**x, "acc": float("nan")} for x in lines], "line 1: acc is nan, not a fi"),
        (lambda lines: [{**x, "acc": 10**400} for x in lines], "acc is 10+[.]{3}, not a fi"),
        (lambda lines: [{**x, "acc": ["a", "b"]} for x in lines], r"acc is \['a', 'b'\], not a fi"),
        (lambda lines: [{"doc_id": x["doc_id"]} for x in lines], "has no metric acc; it has none"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, change: Callable[[Lines], Lines], message: str
) -> None:
    ended = judge(tmp_path, samples(0.5), change(samples(0.5)))
    assert ended.exit_code == 1
    with pytest.raises(UserError, match=message):
        raise ended.exception or AssertionError


def test_a_size_that_no_number_holds_is_named(tmp_path: Path) -> None:
    lines = [line | {"byte_perplexity": [-3.5, 10**400]} for line in samples(0.5)]
    ended = judge(tmp_path, lines, lines, "--metric", "byte_perplexity")
    with pytest.raises(UserError, match=r"byte_perplexity is \[-3.5, 10+[.]{3}, not a log-"):
        raise ended.exception or AssertionError


def test_a_file_that_was_cut_within_a_line_is_named(tmp_path: Path) -> None:
    judge(tmp_path, samples(0.5), samples(0.5))
    new, old = sorted(tmp_path.glob("*/*.jsonl"))
    old.write_text(old.read_text()[:-40])
    ended = CliRunner().invoke(commands, ["gate", str(new), str(old)])
    assert "line 200 is not JSON" in str(ended.exception) and "cut" in str(ended.exception)
    old.write_text("[" * 100_000)
    ended = CliRunner().invoke(commands, ["gate", str(new), str(old)])
    assert "line 1 is not JSON" in str(ended.exception)


def test_the_mark_that_editors_of_windows_write_is_no_part_of_a_line(tmp_path: Path) -> None:
    judge(tmp_path, samples(0.7, seed=1), samples(0.4))
    new, old = sorted(tmp_path.glob("*/*.jsonl"))
    new.write_bytes(b"\xef\xbb\xbf" + new.read_bytes().replace(b"\n", b"\r\n"))
    assert CliRunner().invoke(commands, ["gate", str(new), str(old)]).exit_code == 0


class Parity(LM):
    """Says of numbers below its own whether they are even, and "even" of all others."""

    def __init__(self, knows: int) -> None:
        super().__init__()
        self.knows = knows

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        asked = [(int(one.args[0].split()[0]), one.args[1]) for one in requests]
        odd = [number % 2 == 1 and number < self.knows for number, _ in asked]
        said = [(" odd" if one else " even") == a for one, (_, a) in zip(odd, asked, strict=True)]
        return [(-1.0 if one else -2.0, one) for one in said]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any]) -> list[str]:
        raise NotImplementedError


def test_what_lm_eval_itself_writes_is_read(tmp_path: Path) -> None:
    questions = [
        {"context": f"{n} is", "choices": [" even", " odd"], "answer": n % 2} for n in range(60)
    ]
    write_task("parity", questions, tmp_path / "tasks")
    paths = []
    for name, knows in (("new", 60), ("old", 0)):
        manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
        found = simple_evaluate(
            Parity(knows),
            tasks=["parity"],
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
        )
        tracker = EvaluationTracker(output_path=str(tmp_path / name))
        tracker.general_config_tracker.model_name_sanitized = name
        tracker.date_id = "2026-06-11T10-20-30.123456"
        tracker.save_results_samples("parity", found["samples"]["parity"])
        paths += [str(path) for path in (tmp_path / name).rglob("samples_parity_*.jsonl")]
    judged = CliRunner().invoke(commands, ["gate", *paths, "--json"])
    assert judged.exit_code == 0, judged.output
    compared = json.loads(judged.stdout)["comparison"]
    assert (compared["task"], compared["difference"]) == ("parity", 0.5)
