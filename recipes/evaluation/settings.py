"""What `eval_metrics` measures, and by which metric; importing it loads neither torch nor Arrow."""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from artifacts.settings import Settings
from artifacts.store.identity import FINGERPRINT_LENGTH

GENERAL_TASK = "general"
"""The name under which general text is measured."""


class Metric(BaseModel):
    """A figure that is a sum of scores over a sum of sizes, of documents or examples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """As the evaluation reports it: `held_out_<name>`."""
    unit: str
    """In words, such as `bits per byte`."""
    higher_is_better: bool = False
    has_general: bool = False
    """Whether forgetting is measured as well, on general text."""
    is_bits: bool = False
    """Whether scores are bits, so that a draw from the vocabulary says what chance would score."""

    def of(self, task: str) -> "Metric":
        """What the documents of a task are measured by.

        Usually the same; but general text has no answers, and a score that counts right examples
        says nothing of it: it is measured in bits then.
        """
        is_other = self.higher_is_better or self == ANSWER_BITS_PER_BYTE
        return BITS_PER_BYTE if task == GENERAL_TASK and is_other else self


ANSWER_BITS_PER_BYTE = Metric(
    name="bits_per_byte", unit="bits per byte of answers", has_general=True, is_bits=True
)
BITS_PER_BYTE = Metric(name="bits_per_byte", unit="bits per byte", has_general=True, is_bits=True)


CODE_VERSION = "16"
SCORES_NAME = "scores.parquet"
TASK_SCORES_NAME = "task_scores.parquet"
SAMPLES_NAME = "samples.json"
ROUND_PARTS = (4, 2)
"""The first round measures a quarter of the held-out tokens, the second a half."""
QUESTION_FOLDER = "exam"
"""Where questions are while models answer them. They hold text of the corpus, so nothing keeps
them: `forget` would have to look into them."""

Folder = Annotated[str, BeforeValidator(os.fspath)]
"""A local folder; `gs://` in a spec that the container's launcher turns into mounted paths."""


OPEN_LLM_LEADERBOARD = "open_llm_leaderboard"
OPEN_LLM_LEADERBOARD_SHOTS = {
    "arc_challenge": 25,
    "hellaswag": 10,
    "mmlu": 5,
    "truthfulqa_mc2": 0,
    "winogrande": 5,
    "gsm8k": 5,
}
"""Task and shots of the Open LLM Leaderboard, version 1; the tasks' data are on the hub."""


class GenerationSettings(Settings):
    """Short completions from every model side by side, for people to look at."""

    samples: int = Field(default=2, ge=0)
    """Number of held-out documents, or of exam questions if there is an exam, that each model
    continues; 0 turns this off. Recipes whose metric is not bits per byte ignore these settings and
    show up to two of their examples instead."""
    prompt_tokens: int = Field(default=32, ge=1)
    """Number of a document's first tokens that the model is given; of a conversation, all before
    its first answer, and of an exam question, all."""
    new_tokens: int = Field(default=32, ge=1)
    """Maximum number of tokens that each model generates, by greedy decoding."""


class TaskSettings(Settings):
    """One of lm-eval's tasks."""

    name: str
    """The task's name in lm-eval or in a file in `task_folder`; `open_llm_leaderboard` stands for
    ARC, HellaSwag, MMLU, TruthfulQA, Winogrande and GSM8K with the number of shots that is usual in
    comparisons."""
    shots: int | None = Field(default=None, ge=0)
    """Solved examples before each question; if unset, the task's own number."""
    limit: int | None = Field(default=None, ge=1)
    """Use only this many questions, the first ones, of each part of a group; if unset, all."""

    @model_validator(mode="after")
    def _leave_a_groups_shots(self) -> "TaskSettings":
        if self.name == OPEN_LLM_LEADERBOARD and self.shots is not None:
            raise ValueError(
                f"{OPEN_LLM_LEADERBOARD} has its own numbers of shots; leave `shots` out"
            )
        return self


class EvaluationSettings(Settings):
    """The `eval_metrics` asset: which data the models are measured on, and how much of it."""

    held_out_tokens: int | None = Field(default=40_000, ge=1)
    """How many held-out tokens to measure: documents are taken, in the order of a hash of their
    clusters, until they hold this many; `null` means all. A quarter is measured first, then half,
    then all, until the verdict is known; where the exam decides, a quarter is measured; metrics
    other than bits per byte of text are measured all at once. At 135M parameters, 10,000 tokens
    take two cores about 12 s."""
    document_tokens: int | None = Field(default=512, ge=16)
    """Maximum number of tokens to measure per document, beginning with its first: many short
    samples give a more certain verdict than a few long ones. `null` means the whole document.
    Conversations and other examples are always measured whole."""
    minimum_documents: int = Field(default=36, ge=1)
    """Minimum number of independent documents (duplicate clusters) to measure first, however many
    tokens they hold; at least `model_version.gate.minimum_documents`, which a verdict needs, are
    measured in any case."""
    newest_tokens: int | None = Field(default=2_500, ge=1)
    """How many held-out tokens of the newest slice (the text that arrived last) to measure
    separately, once there are two slices, as `held_out_newest_<metric>`; `null` means all."""
    general_tokens: int | None = Field(default=2_500, ge=1)
    """How many tokens of the included general English text to measure; `null` means all of them,
    about 10,000. The recipes `classification` and `sequence_to_sequence` do not measure it."""
    generation: GenerationSettings = GenerationSettings()
    """Side-by-side completions."""
    tasks: tuple[TaskSettings, ...] = ()
    """lm-eval tasks, reported as `<task>_<metric>`; those on the Hub need a connection. Only
    recipes whose metric is bits per byte run them."""
    task_folder: str | None = None
    """Local folder with lm-eval task files of your own."""
    seed: int = 0
    """Seed that determines, together with the candidate's weights, which documents are sampled."""
    batch_tokens: int = Field(default=2_048, ge=1)
    """Maximum number of tokens per forward pass, but at least one row; choose it to fit the
    available memory. It does not change what is measured."""

    @model_validator(mode="after")
    def _check_names(self) -> "EvaluationSettings":
        names = [task.name for task in self.lm_eval_tasks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"tasks asks {' and '.join(twice)} more than once ({OPEN_LLM_LEADERBOARD} asks "
                f"{', '.join(OPEN_LLM_LEADERBOARD_SHOTS)}), whose scores would replace one another"
            )
        return self

    @property
    def lm_eval_tasks(self) -> list[TaskSettings]:
        """The tasks to run, a group as its parts."""
        tasks: list[TaskSettings] = []
        for task in self.tasks:
            names = {task.name: task.shots}
            if task.name == OPEN_LLM_LEADERBOARD:
                names = dict(OPEN_LLM_LEADERBOARD_SHOTS)
            tasks += [TaskSettings(name=n, shots=s, limit=task.limit) for n, s in names.items()]
        return tasks

    @property
    def libraries(self) -> set[str]:
        """Those that decide the scores."""
        used = {"tokenizers", "torch", "transformers"}
        return used | ({"lm-eval"} if self.tasks else set())

    def first_round(self) -> "EvaluationSettings":
        """The settings where held-out text decides nothing: what is measured first is enough."""
        tokens = self.held_out_tokens and -(-self.held_out_tokens // ROUND_PARTS[0])
        return self.model_copy(update={"held_out_tokens": tokens})

    def drawn_for(self, model: str) -> "EvaluationSettings":
        """The settings with a seed of the candidate's own, so that each candidate is measured on
        its own draw.

        Then the scores of earlier candidates say little about the documents of the next.
        """
        digest = hashlib.sha256(f"{self.seed}\0{model}".encode()).hexdigest()
        return self.model_copy(update={"seed": int(digest[:8], 16)})

    def content(self) -> dict[str, Any]:
        """What decides the result, for the fingerprint: files count by what they hold."""
        content = self.model_dump(mode="json", exclude={"batch_tokens", "task_folder"})
        if self.task_folder:
            folder, state = Path(self.task_folder), hashlib.sha256()
            for file in task_files(folder):
                state.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
            content["task_files"] = state.hexdigest()[:FINGERPRINT_LENGTH]
        return content


def task_files(folder: Path) -> list[Path]:
    """The files that define tasks. Hidden files, and what Python compiles beside the others, do not
    count, or loading a task would change it."""
    paths = []
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        if file.is_file() and not any(p == "__pycache__" or p.startswith(".") for p in parts):
            paths.append(file)
    return paths


class ModelSource(Settings):
    """One model to measure."""

    path: Folder
    """A Hugging Face folder."""
    fingerprint: str
    """Of the artifact that holds it; models with one fingerprint are measured once."""
    fault: str | None = None
    """Why there is no use in measuring it, as when its training diverged."""


class GateQuestion(Settings):
    """What the gate asks, so that measuring ends once the answer is known."""

    look: int = Field(ge=1)
    """1, and one more for each comparison of the pipeline's life that could have promoted and did
    not."""
    readable: int = Field(ge=0)
    """Earlier judgements whose scores may have been read by whoever chose the procedure that made
    the candidate."""
    lifetime_error: float
    smallest_effect: float
    """Both as in `model_version.gate`."""


class Rounds(Settings):
    """How far a measurement went."""

    measured: int = Field(ge=1)
    planned: int
    """Rounds that the budget allows; known before the first one."""
    share: float
    """Of all held-out documents, those within the budget."""
