"""Multiple choice and lm-eval's tasks from local files, on tiny models."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from recipes.evaluation.documents import held_out_documents
from recipes.evaluation.harness import (
    MULTIPLE_CHOICE_TASK,
    index_tasks,
    make_questions,
    run_tasks,
    score_summaries,
    write_task,
)
from recipes.evaluation.measure import evaluate
from recipes.evaluation.settings import (
    EvaluationSettings,
    GenerationSettings,
    ModelSource,
    MultipleChoiceSettings,
    SummarySettings,
    TaskSettings,
)
from recipes.evaluation.spec import EvaluationSpec

MULTIPLE_CHOICE = MultipleChoiceSettings(
    questions=10, choices=3, context_tokens=24, choice_tokens=8
)
WHOLE = EvaluationSettings(held_out_tokens=None, document_tokens=None)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def model(base_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base_model).eval()


@pytest.fixture(scope="module")
def tokenizer(base_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model)


@pytest.fixture
def questions(shards_folder: Path, shards: ShardStats, tokenizer: Any) -> list[dict[str, Any]]:
    documents = held_out_documents(shards_folder, shards, tokenizer, WHOLE)
    return make_questions(documents, tokenizer, MULTIPLE_CHOICE)


def test_questions_are_the_same_each_time_and_the_right_choice_goes_on(
    questions: list[dict[str, Any]], shards_folder: Path, shards: ShardStats, tokenizer: Any
) -> None:
    documents = held_out_documents(shards_folder, shards, tokenizer, WHOLE)
    assert make_questions(documents, tokenizer, MULTIPLE_CHOICE) == questions
    texts = {
        document.id: tokenizer.decode(document.tokens, skip_special_tokens=True)
        for document in documents
    }
    for question in questions:
        right = question["choices"][question["answer"]]
        assert texts[question["document"]].startswith(question["context"] + right)
        assert len(question["choices"]) == 3
    assert len({question["answer"] for question in questions}) > 1


def test_too_few_long_documents_are_named(
    shards_folder: Path, shards: ShardStats, tokenizer: Any
) -> None:
    documents = held_out_documents(shards_folder, shards, tokenizer, WHOLE)
    with pytest.raises(UserError, match=r"eval_metrics\.multiple_choice\.context_tokens"):
        make_questions(
            documents, tokenizer, MULTIPLE_CHOICE.model_copy(update={"context_tokens": 5_000})
        )


@pytest.mark.parametrize("batch_tokens", [1, 300, 4_096])
def test_scores_are_lm_evals_own(
    questions: list[dict[str, Any]],
    tmp_path: Path,
    model: Any,
    tokenizer: Any,
    batch_tokens: int,
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from recipes.evaluation.shared_context import SharedContextLM

    ours = SharedContextLM(model, tokenizer, batch_tokens)
    peer = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", device="cpu")
    requests = [
        Instance("loglikelihood", question, (question["context"], choice), number)
        for question in questions
        for number, choice in enumerate([*question["choices"], " a"])
    ]
    # One context that only fits when cut from the left, as lm-eval cuts it.
    long = "The valve opens. " * 60
    requests += [Instance("loglikelihood", {}, (long, text), 0) for text in (" A pump", " fails")]
    for mine, theirs in zip(
        ours.loglikelihood(requests, disable_tqdm=True),
        peer.loglikelihood(requests, disable_tqdm=True),
        strict=True,
    ):
        assert mine[0] == pytest.approx(theirs[0], abs=1e-3)
        assert mine[1] == theirs[1]
    write_task(MULTIPLE_CHOICE_TASK, questions, tmp_path)
    tasks = [TaskSettings(name=MULTIPLE_CHOICE_TASK)]
    for mine, theirs in zip(
        run_tasks(ours, tasks, [tmp_path]), run_tasks(peer, tasks, [tmp_path]), strict=True
    ):
        assert (mine.metric, mine.samples) == (theirs.metric, theirs.samples)
        assert mine.values.tolist() == theirs.values.tolist()


def test_multiple_choice_is_part_of_the_evaluation(
    tmp_path: Path, base_model: Path, shards_folder: Path, shards: ShardStats
) -> None:
    spec = EvaluationSpec(
        base=ModelSource(path=base_model, fingerprint="base"),
        candidate=ModelSource(path=base_model, fingerprint="base"),
        shards=shards_folder,
        shard_stats=shards,
        shards_fingerprint="shards",
        output=tmp_path / "output",
        cache=tmp_path / "cache",
        settings=EvaluationSettings(
            multiple_choice=MULTIPLE_CHOICE,
            generation=GenerationSettings(samples=0),
            bootstrap_resamples=200,
        ),
    )
    result = evaluate(spec, lambda _: None)
    accuracy = result["metrics"]["domain_multiple_choice_acc"]
    assert 0 <= accuracy["base"]["value"] <= 1
    assert accuracy["base"] == accuracy["candidate"]
    rows = pq.read_table(tmp_path / "output" / "task_scores.parquet").to_pylist()
    assert {row["metric"] for row in rows} == {"acc", "acc_norm"}
    assert len(rows) == 2 * MULTIPLE_CHOICE.questions and rows[0]["cluster"].startswith("cluster-")
    moved = spec.model_copy(update={"output": str(tmp_path / "elsewhere")})
    assert evaluate(moved, lambda _: None) == result


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
    assert {task.name for task in tasks} <= set(index_tasks().all_tasks)
    with pytest.raises(ValidationError, match="has its own shots"):
        TaskSettings(name="open_llm_leaderboard", shots=3)


def test_unknown_task_and_task_without_its_data_are_named(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    from recipes.evaluation.shared_context import SharedContextLM

    lm = SharedContextLM(model, tokenizer, 512)
    with pytest.raises(UserError, match="no task 'nobody_knows'"):
        run_tasks(lm, [TaskSettings(name="nobody_knows")], [])
    write_task(MULTIPLE_CHOICE_TASK, [], tmp_path)
    (tmp_path / f"{MULTIPLE_CHOICE_TASK}.jsonl").unlink()
    with pytest.raises(UserError, match=MULTIPLE_CHOICE_TASK):
        run_tasks(lm, [TaskSettings(name=MULTIPLE_CHOICE_TASK)], [tmp_path])
    assert json.dumps(TaskSettings(name="x").model_dump())


def test_summaries_are_scored_and_wrong_lines_named(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    import torch

    path = tmp_path / "summaries.jsonl"
    document = "The valve opens. A pump fails."
    prompt = torch.tensor([tokenizer.encode(document) + tokenizer.encode(" The pump")])
    written = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    own = tokenizer.decode(written, skip_special_tokens=True)
    assert any(character.isalpha() for character in own)
    lines = [{"document": document, "summary": own}, {"document": document, "summary": "zzz"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = SummarySettings(path=str(path), prompt="{document} The pump", new_tokens=12)
    rouge1, _, longest = score_summaries(model, tokenizer, settings)
    assert rouge1.values.tolist() == [1.0, 0.0] == longest.values.tolist()
    path.write_text('{"document": "a"}\n')
    with pytest.raises(UserError, match="line 1"):
        score_summaries(model, tokenizer, settings)
    absent = settings.model_copy(update={"path": str(tmp_path / "none")})
    with pytest.raises(UserError, match="absent"):
        score_summaries(model, tokenizer, absent)
    contents = [EvaluationSettings(summaries=one).content() for one in (settings, absent)]
    assert contents[0] != contents[1]
    with pytest.raises(ValueError, match="document"):
        SummarySettings(path="x", prompt="no place")
