"""Multiple choice and lm-eval's tasks from local files, on tiny models."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pyarrow.parquet as pq
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from artifacts.errors import UserError
from recipes.evaluation.harness import SEED, TaskFault, digest_tasks, run_tasks, write_task
from recipes.evaluation.measure import evaluate
from recipes.evaluation.settings import (
    OPEN_LLM_LEADERBOARD_SHOTS,
    EvaluationSettings,
    GenerationSettings,
    ModelSource,
    TaskSettings,
)
from recipes.evaluation.shared_context import SharedContextLM
from tests.recipes.evaluation.conftest import MakeSpec
from tests.recipes.model.architectures import tiny_kind
from tests.tiny import change_config

TASK = "which_goes_on"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def model(base_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_model).eval()


@pytest.fixture(scope="module")
def tokenizer(base_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(base_model)


@pytest.fixture(scope="module")
def peer(model: Any, tokenizer: Any) -> HFLM:
    """lm-eval's own backend."""
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", device="cpu")


@pytest.fixture
def questions() -> list[dict[str, Any]]:
    """How texts of different lengths go on, among three choices."""
    parts = ["The valve opens", "A pump fails at night", "Pressure rises in the second pipe"]
    return [
        {
            "document": f"document-{number}",
            "cluster": f"cluster-{number}",
            "context": " and ".join([f"In case {number}", *parts] * (1 + number % 2)),
            "choices": [f" {parts[(number + place) % 3]}." for place in range(3)],
            "answer": number % 3,
        }
        for number in range(10)
    ]


def requests_of(questions: list[dict[str, Any]]) -> list[Instance]:
    return [
        Instance("loglikelihood", question, (question["context"], choice), number)
        for question in questions
        for number, choice in enumerate([*question["choices"], " a"])
    ]


def assert_alike(ours: HFLM, peer: HFLM, requests: list[Instance]) -> None:
    for mine, theirs in zip(
        ours.loglikelihood(requests, disable_tqdm=True),
        peer.loglikelihood(requests, disable_tqdm=True),
        strict=True,
    ):
        assert mine[0] == pytest.approx(theirs[0], abs=1e-3)
        assert mine[1] == theirs[1]


def task_of(folder: Path) -> dict[str, Any]:
    """Settings of an evaluation that asks one task of a folder, and no more."""
    tasks, nothing = (TaskSettings(name=TASK),), GenerationSettings(samples=0)
    return {"tasks": tasks, "task_folder": str(folder), "generation": nothing}


@pytest.mark.parametrize("batch_tokens", [1, 300, 4_096])
def test_scores_are_lm_evals_own(
    questions: list[dict[str, Any]],
    tmp_path: Path,
    model: Any,
    tokenizer: Any,
    peer: HFLM,
    batch_tokens: int,
) -> None:
    ours = SharedContextLM(model, tokenizer, batch_tokens)
    requests = requests_of(questions)
    # One context that only fits when cut from the left, as lm-eval cuts it.
    long = "The valve opens. " * 60
    requests += [Instance("loglikelihood", {}, (long, text), 0) for text in (" A pump", " fails")]
    assert_alike(ours, peer, requests)
    write_task(TASK, questions, tmp_path)
    tasks = [TaskSettings(name=TASK)]
    for mine, theirs in zip(
        run_tasks(ours, tasks, [tmp_path]), run_tasks(peer, tasks, [tmp_path]), strict=True
    ):
        assert (mine.metric, mine.samples) == (theirs.metric, theirs.samples)
        assert mine.values.tolist() == theirs.values.tolist()


@pytest.mark.parametrize("copies", [1, 60])
def test_log_likelihoods_of_a_bfloat16_model_are_summed_in_float32(
    copies: int, base_model: Path, tokenizer: Any
) -> None:
    """Choices in one row, and ones that stand alone since their context does not fit."""
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.bfloat16).eval()
    context = " ".join(["The valve opens."] * copies)
    choice = " A pump fails at night, and pressure rises." * 2
    requests = [Instance("loglikelihood", {}, (context, choice), 0)]
    ours = SharedContextLM(model, tokenizer, 512)
    [(found, _)] = ours.loglikelihood(requests, disable_tqdm=True)
    tokens = torch.tensor(tokenizer.encode(context + choice))
    scored = len(tokens) - len(tokenizer.encode(context))
    tokens = tokens[-ours.max_length - 1 :]
    with torch.inference_mode():
        logits = model(tokens[None, :-1]).logits[0, -scored:].float()
    expected = logits.log_softmax(-1).gather(-1, tokens[-scored:, None]).sum()
    # Here one step of bfloat16 is 1; rows of other widths differ by some hundredths of it.
    assert expected < -128 and found == pytest.approx(float(expected), abs=0.2)


def test_questions_without_a_text_of_their_own_are_read_in_rows_of_bounded_length(
    model: Any, tokenizer: Any, peer: HFLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in tasks that compare whole sentences: one context, that of nothing, for all of them."""
    texts = [f"Valve {number} opens {how}." for number in range(40) for how in ("now", "at night")]
    requests = [Instance("loglikelihood", {}, ("", text), 0) for text in texts]
    rows: list[int] = []
    score = SharedContextLM._score

    def spy(self: Any, batch: Any) -> Any:
        rows.extend(question.length for question in batch)
        return score(self, batch)

    monkeypatch.setattr(SharedContextLM, "_score", spy)
    assert_alike(SharedContextLM(model, tokenizer, 64), peer, requests)
    assert len(rows) > 4 and max(rows) <= 64


def test_what_the_questions_reader_copies_of_them_lies_beside_them(
    questions: list[dict[str, Any]], tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    everywhere = Path(datasets.config.HF_DATASETS_CACHE)
    before = sorted(everywhere.rglob("*"))
    plain, odd = tmp_path / "plain", tmp_path / "[odd]*? {ünused}"
    for folder in (plain, odd):
        write_task(TASK, questions, folder)
    digest = digest_tasks([TaskSettings(name=TASK)], [plain])

    run_tasks(SharedContextLM(model, tokenizer, 512), [TaskSettings(name=TASK)], [odd])

    assert sorted(everywhere.rglob("*")) == before
    assert any(path.suffix == ".arrow" for path in odd.rglob("*"))
    assert digest_tasks([TaskSettings(name=TASK)], [odd]) == digest


def test_what_loading_a_task_leaves_beside_it_makes_no_other_task(tmp_path: Path) -> None:
    settings = EvaluationSettings(task_folder=str(tmp_path))
    (tmp_path / "utils.py").write_text("import math")
    before = settings.content()
    for name in ("__pycache__/utils.cpython-311.pyc", ".DS_Store", "part/.ipynb_checkpoints/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert settings.content() == before
    (tmp_path / "utils.py").write_text("import os")
    assert settings.content() != before


@pytest.mark.parametrize(
    ("line", "wrong", "settings", "told"),
    [
        ("doc_to_text: .*", "doc_to_text: !function utils.said", {}, ".*no_such_package"),
        ("doc_to_text: .*", 'doc_to_text: "{{context"', {}, "TemplateSyntaxError: unexpected end"),
        ("doc_to_choice: .*", 'doc_to_choice: "{{chooses}}"', {}, ".*'chooses' is undefined"),
        ("test_split: .*", "test_split: tset", {}, "KeyError: 'tset'"),
        ("test: .*", "test: gone.jsonl", {}, "FileNotFoundError: .*gone.jsonl"),
        ("^", "", {"shots": 50}, r"ValueError: Sample larger .* or `shots`"),
    ],
)
def test_a_task_that_cannot_be_run_is_named_with_what_is_wrong(
    line: str,
    wrong: str,
    settings: dict[str, int],
    told: str,
    questions: list[dict[str, Any]],
    tmp_path: Path,
    model: Any,
    tokenizer: Any,
) -> None:
    write_task(TASK, questions, tmp_path)
    (tmp_path / "utils.py").write_text("import no_such_package\n\ndef said(doc): return ''\n")
    file = tmp_path / f"{TASK}.yaml"
    file.write_text(re.sub(line, wrong, file.read_text(), count=1))
    tasks = [TaskSettings(name=TASK, **settings)]
    with pytest.raises(UserError, match=rf"cannot run the task '{TASK}' \({told}"):
        run_tasks(SharedContextLM(model, tokenizer, 512), tasks, [tmp_path])


@pytest.mark.fault(
    "eval_metrics",
    "a machine, or a task of lm-eval, that fails while a candidate is asked",
    sees="what failed",
    then="nothing is counted against the candidate: the same run measures it again",
)
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), RuntimeError),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), RuntimeError),
        (torch.AcceleratorError("an illegal memory access"), torch.AcceleratorError),
        (torch.OutOfMemoryError("HIP out of memory."), torch.OutOfMemoryError),
        (MemoryError(), MemoryError),
        (RuntimeError("a metric of the task"), TaskFault),
        (ValueError("a metric of the task"), TaskFault),
    ],
)
def test_what_a_machine_or_a_task_fails_in_is_no_fault_of_the_model(
    error: Exception,
    raised: type[Exception],
    questions: list[dict[str, Any]],
    tmp_path: Path,
    make_evaluation: MakeSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_task(TASK, questions[:1], tmp_path / "tasks")
    asked: list[Any] = []

    def fail_for_the_second(lm: Any, requests: list[Instance]) -> list[tuple[float, bool]]:
        asked.append(lm)
        if len(asked) > 1:
            raise error
        return [(0.0, True)] * len(requests)

    monkeypatch.setattr(SharedContextLM, "loglikelihood", fail_for_the_second)
    with pytest.raises(raised):
        evaluate(make_evaluation(settings=task_of(tmp_path / "tasks")), lambda _: None)
    assert len(asked) == 2


@pytest.mark.parametrize("kind", ["mpt", "mistral"])
def test_choices_stand_alone_where_their_row_would_change_their_scores(
    kind: str, questions: list[dict[str, Any]], tmp_path: Path, base_model: Path, tokenizer: Any
) -> None:
    """MPT counts places by itself; Mistral's attention has a window."""
    folder = tiny_kind(kind, base_model, tmp_path / "made")
    windowed = change_config(folder, tmp_path / "model", sliding_window=16)
    model = AutoModelForCausalLM.from_pretrained(windowed).eval()
    peer = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", device="cpu")
    assert_alike(SharedContextLM(model, tokenizer, 4_096), peer, requests_of(questions[:2]))


def test_tasks_of_a_folder_are_part_of_the_evaluation(
    tmp_path: Path,
    questions: list[dict[str, Any]],
    base_model: Path,
    candidate: Path,
    make_evaluation: MakeSpec,
) -> None:
    write_task(TASK, questions, tmp_path / "tasks")
    spec = make_evaluation(
        candidate=ModelSource(path=base_model, fingerprint="base"),
        cache=tmp_path / "cache",
        settings=task_of(tmp_path / "tasks") | {"general_tokens": None},
    )
    result = evaluate(spec, lambda _: None)
    accuracy = result["metrics"][f"{TASK}_acc"]
    assert 0 <= accuracy["base"]["value"] <= 1
    assert accuracy["base"] == accuracy["candidate"]
    rows = pq.read_table(tmp_path / "output" / "task_scores.parquet").to_pylist()
    assert {row["metric"] for row in rows} == {"acc", "acc_norm"}
    assert len(rows) == 2 * len(questions) and rows[0]["cluster"].startswith("cluster-")
    moved = spec.model_copy(update={"output": str(tmp_path / "elsewhere")})
    assert evaluate(moved, lambda _: None) == result

    # The next candidate draws another order, but here of all documents, and has the same questions.
    next_one = make_evaluation(
        candidate=ModelSource(path=candidate, fingerprint="next"),
        cache=tmp_path / "cache",
        settings=task_of(tmp_path / "tasks") | {"general_tokens": None, "seed": 1},
    )
    lines: list[str] = []
    kept = {*(tmp_path / "cache").iterdir()}
    again = evaluate(next_one, lines.append)["metrics"]
    assert [line for line in lines if "answering" in line] == [f"candidate: answering {TASK}"]
    for name in (f"{TASK}_acc", "general_bits_per_byte"):
        assert again[name]["base"] == pytest.approx(result["metrics"][name]["base"])
    # Of both models all scores; of the new one alone bits of two tasks, and answers.
    assert len({*(tmp_path / "cache").iterdir()} - kept) == 2 + 3


def test_figures_that_are_no_means_are_lm_evals_own(
    tmp_path: Path, base_model: Path, make_evaluation: MakeSpec, model: Any, tokenizer: Any
) -> None:
    """As the perplexity of LAMBADA and of WikiText; and a group whose tasks have other metrics."""
    folder = tmp_path / "tasks"
    rows = [
        {"document": f"document-{n}", "context": f"The pump {n}", "end": " fails at night."}
        for n in range(4)
    ]
    write_task("last_word", rows, folder)
    common = (folder / "last_word.yaml").read_text().partition("output_type")[0]
    for task, kind, metrics in (
        ("last_word", "loglikelihood", ("perplexity", "acc")),
        ("running_text", "loglikelihood_rolling", ("word_perplexity",)),
    ):
        (folder / f"{task}.yaml").write_text(
            common.replace("task: last_word", f"task: {task}") + f"output_type: {kind}\n"
            'doc_to_text: "{{context}}"\ndoc_to_target: "{{end}}"\nmetric_list:\n'
            + "".join(f"  - metric: {metric}\n" for metric in metrics)
        )
    (folder / "both.yaml").write_text("group: both\ntask:\n  - last_word\n  - running_text\n")
    names = ("last_word", "running_text", "both")
    spec = make_evaluation(
        settings={
            "tasks": tuple(TaskSettings(name=name) for name in names),
            "task_folder": str(folder),
            "generation": GenerationSettings(samples=0),
        },
    )
    metrics = evaluate(spec, lambda _: None)["metrics"]
    requests = [Instance("loglikelihood", {}, (row["context"], row["end"]), 0) for row in rows]
    told = SharedContextLM(model, tokenizer, 512).loglikelihood(requests, disable_tqdm=True)
    nats = -sum(likelihood for likelihood, _ in told) / len(told)
    perplexity = metrics["last_word_perplexity"]["base"]["value"]
    assert math.log(perplexity) == pytest.approx(nats, rel=1e-2)
    assert metrics["running_text_word_perplexity"]["base"]["value"] > 1
    assert metrics["both_acc"] == metrics["last_word_acc"]
    listed = pq.read_table(tmp_path / "output" / "task_scores.parquet").to_pylist()
    assert {(row["task"], row["metric"]) for row in listed} == {
        ("last_word", "acc"),
        ("both", "acc"),
    }


@pytest.mark.parametrize("by_size", [True, False])
def test_a_group_weighs_its_parts_as_its_file_says(
    by_size: bool, tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    for name, count in (("small", 2), ("large", 12)):
        rows: Any = [{"context": "The pump", "choices": [" fails", " runs"]} for _ in range(count)]
        write_task(name, [row | {"answer": int(name == "large")} for row in rows], tmp_path)
    (tmp_path / "group.yaml").write_text(
        "group: both\ntask: [small, large]\naggregate_metric_list:\n"
        f"  - metric: acc\n    weight_by_size: {by_size}\n"
    )
    lm = SharedContextLM(model, tokenizer, 512)
    found = {
        one: run_tasks(lm, [TaskSettings(name=one)], [tmp_path])[0]
        for one in ("small", "large", "both")
    }
    small, large, both = (one.value for one in found.values())
    assert {small, large} == {0.0, 1.0}
    assert both == pytest.approx((2 * small + 12 * large) / 14 if by_size else 0.5)
    of_both = found["both"]
    assert len(set(of_both.samples)) == len(set(of_both.clusters)) == (14 if by_size else 0)


def test_leaderboards_tasks_are_known_to_lm_eval_with_the_shots_that_people_compare() -> None:
    group = TaskSettings(name="open_llm_leaderboard", limit=7)
    tasks = EvaluationSettings(tasks=(group,)).lm_eval_tasks
    assert [(task.name, task.shots) for task in tasks] == [
        ("arc_challenge", 25),
        ("hellaswag", 10),
        ("mmlu", 5),
        ("truthfulqa_mc2", 0),
        ("winogrande", 5),
        ("gsm8k", 5),
    ]
    assert {task.limit for task in tasks} == {7}
    # Their folders alone: to read all of lm-eval's takes many seconds.
    places = [Path(lm_eval.tasks.__file__).with_name(task.name.split("_")[0]) for task in tasks]
    known = TaskManager(include_path=list(map(str, places)), include_defaults=False)
    assert {task.name for task in tasks} <= set(known.all_tasks)
    with pytest.raises(ValidationError, match="has its own numbers of shots"):
        TaskSettings(name="open_llm_leaderboard", shots=3)
    for again in (group, TaskSettings(name="gsm8k", shots=0)):
        with pytest.raises(ValidationError, match="gsm8k more than once"):
            EvaluationSettings(tasks=(TaskSettings(name="gsm8k"), again))


@pytest.mark.soak
def test_an_unknown_task_is_named(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    """For which all of lm-eval's tasks are read, for many seconds."""
    with pytest.raises(UserError, match="no task 'nobody_knows'"):
        tasks = [TaskSettings(name="nobody_knows")]
        run_tasks(SharedContextLM(model, tokenizer, 512), tasks, [tmp_path])


DEFINITIONS = {
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "mmlu": "mmlu/default/mmlu_anatomy.yaml",
    "truthfulqa_mc2": "truthfulqa/truthfulqa_mc2.yaml",
    "winogrande": "winogrande/default.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
}


def own_questions(task: str) -> list[dict[str, Any]]:
    """Questions of our own in the columns of a leaderboard's task."""
    parts = ["valve", "pump", "filter", "gauge"]
    rows: list[dict[str, Any]] = []
    for number in range(30):
        right = number % 4
        asked = f"Which part of unit {number} is in place {right}?"
        turned = [parts[(number + place) % 4] for place in range(4)]
        rows.append(
            {
                "arc_challenge": {
                    "question": asked,
                    "choices": {"text": turned, "label": ["A", "B", "C", "D"]},
                    "answerKey": "ABCD"[right],
                },
                "hellaswag": {
                    "activity_label": "Repairing a pump",
                    "ctx_a": f"[header] A fitter opens unit {number}.",
                    "ctx_b": "the fitter",
                    "endings": [f"takes out the {part} [step] and closes it." for part in turned],
                    "label": str(right),
                },
                "mmlu": {"question": asked, "choices": turned, "answer": right},
                "truthfulqa_mc2": {
                    "question": asked,
                    "mc1_targets": {"choices": turned, "labels": [1, 0, 0, 0]},
                    "mc2_targets": {"choices": turned, "labels": [1, number % 2, 0, 0]},
                },
                "winogrande": {
                    "sentence": f"In unit {number} the _ is worn, so it is exchanged.",
                    "option1": turned[0],
                    "option2": turned[1],
                    "answer": str(1 + number % 2),
                },
                "gsm8k": {
                    "question": f"A unit has {number} valves and 2 pumps. How many parts has it?",
                    "answer": f"{number} and 2 are {number + 2}.\n#### {number + 2}",
                },
            }[task]
        )
    return rows


@pytest.mark.soak
@pytest.mark.parametrize("task", OPEN_LLM_LEADERBOARD_SHOTS)
def test_leaderboards_definitions_score_as_by_lm_evals_own_command(
    task: str, tmp_path: Path, base_model: Path, model: Any, tokenizer: Any
) -> None:
    """lm-eval's own files with the leaderboard's shots; the questions alone are ours."""
    theirs = Path(lm_eval.tasks.__file__).parent / DEFINITIONS[task]
    shots = OPEN_LLM_LEADERBOARD_SHOTS[task]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in own_questions(task)))
    splits = dict.fromkeys(("train", "dev", "validation", "test"), str(questions))
    name, folder = f"our_{task}", tmp_path / "tasks"
    folder.mkdir()
    (folder / f"{name}.yaml").write_text(
        f"include: {theirs}\ntask: {name}\ntag: null\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {json.dumps({'data_files': splits})}\n"
        # The tiny model has room for no more.
        + ("generation_kwargs: {max_gen_toks: 16, do_sample: false}\n" if task == "gsm8k" else "")
    )
    found = run_tasks(
        SharedContextLM(model, tokenizer, 4_096), [TaskSettings(name=name, shots=shots)], [folder]
    )
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"),
        *("--model_args", f"pretrained={base_model},dtype=float32", "--tasks", name),
        *("--include_path", str(folder), "--num_fewshot", str(shots)),
        *("--batch_size", "1", "--seed", str(SEED), "--output_path", str(tmp_path / "theirs")),
    ]
    subprocess.run(command, check=True)
    (written,) = (tmp_path / "theirs").rglob("results_*.json")
    results = json.loads(written.read_text())["results"][name]
    expected = {
        key.removesuffix(",none").replace(",", "_").replace("-", "_"): value
        for key, value in results.items()
        if "," in key and "_stderr" not in key
    }
    assert {one.metric: one.values.mean() for one in found} == pytest.approx(expected)
    assert {len(one.samples) for one in found} == {30}
