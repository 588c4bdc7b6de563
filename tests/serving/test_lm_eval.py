"""lm-eval's `local-completions`, unmodified, scores through the endpoint what the model says."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serving.conftest import served

CONTEXT = 64
LINES = [
    ("The valve is", " closed."),
    ("Клапан", " закрыт."),
    ("βαλβίδα", " κλειστή."),
    ("الصمام", " مغلق."),
    ("השסתום", " סגור."),
    ("वाल्व", " बंद है।"),
    ("วาล์ว", "ปิดอยู่"),
    ("漢字", "混じりの文"),
    ("밸브가", " 닫혔다."),
    ("👩‍🔧 🔧", " 👍🏽"),
]
"""The beginning of a line and its end, in ten scripts."""
STEPS = 80


@pytest.fixture(scope="module")
def ten_scripts_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows every other of the lines by heart, by parts of characters."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    known = [torch.tensor([tokenizer.encode(f"{a}{b}")]) for a, b in LINES[::2]]
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(STEPS):
        line = known[step % len(known)]
        optimizer.zero_grad()
        model(line, labels=line).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("scripts") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ten_scripts(ten_scripts_folder: Path) -> Iterator[LocalCompletionsAPI]:
    with served(ten_scripts_folder.parent / "endpoint", ten_scripts_folder) as client:
        yield LocalCompletionsAPI(
            model="default",
            base_url=f"{client.url}/v1/completions",
            tokenizer=str(ten_scripts_folder),
            tokenizer_backend="huggingface",
            max_length=CONTEXT,
        )


@pytest.mark.soak
def test_accuracy_in_ten_scripts_is_that_of_hugging_face(
    ten_scripts: LocalCompletionsAPI, ten_scripts_folder: Path
) -> None:
    pairs = [*LINES, *((a, LINES[n - 1][1]) for n, (a, _) in enumerate(LINES))]
    asked = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    itself = HFLM(str(ten_scripts_folder), device="cpu", dtype="float32", batch_size=1)
    expected, found = itself.loglikelihood(asked), ten_scripts.loglikelihood(asked)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in expected} == {True, False}, "the model knows some lines"
    np.testing.assert_allclose([s for s, _ in found], [s for s, _ in expected], atol=1e-3)
