"""Loaded models as the engine uses them, in this process."""

import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM

from artifacts.errors import UserError
from serving.engine.openvino_model import TURNS
from serving.engine.program import choose_engine, load_model
from serving.engine.protocol import Chunk, GenerateRequest, Refused
from serving.engine.served_model import (
    BROKEN_EXIT_CODE,
    Job,
    ServedModel,
    ServedTokenizer,
    TokenLikelihood,
    TokenTexts,
)
from tests.serving.conftest import SETTINGS
from tests.serving.test_architectures import write_model
from tests.tiny import tiny_texts
from tests.waiting import WAIT_SECONDS

TOKENS = 150
GROUPS = 100
PROMPT = "The valve"
KEY_PROGRAM = """
import sys
from pathlib import Path
from serving.engine.program import conversion_key
from serving.settings import EndpointSettings
folder, settings, conversions = sys.argv[1:]
given = EndpointSettings.model_validate_json(settings)
print(conversion_key(Path(folder), given, Path(conversions)))
"""
Engine = Literal["openvino", "transformers"]
Loader = Callable[[Path, Engine], ServedModel]


@pytest.fixture(scope="module")
def loaded(conversions: Path) -> Loader:
    """Models by folder and engine, each loaded once."""
    known: dict[tuple[Path, Engine], ServedModel] = {}

    def load(folder: Path, engine: Engine) -> ServedModel:
        if (folder, engine) not in known:
            settings = SETTINGS.model_copy(update={"engine": engine})
            choice = choose_engine(folder, settings, conversions)
            known[folder, engine] = load_model(folder, settings, choice)
        return known[folder, engine]

    return load


def ask(prompt: str | list[int] = PROMPT, **fields: object) -> GenerateRequest:
    plain = {"max_tokens": 12, "max_prompt_tokens": 200, "temperature": 0, "top_p": 1}
    return GenerateRequest.model_validate({"prompt": prompt, **plain, **fields})


async def chunks_of(model: ServedModel, request: GenerateRequest) -> list[Chunk]:
    tokens = model.encode(request)
    return [chunk async for chunk in model.generate(request, tokens)]


def answer(model: ServedModel, request: GenerateRequest) -> Chunk:
    (whole,) = asyncio.run(chunks_of(model, request.model_copy(update={"stream": False})))
    assert whole.error is None
    return whole


def test_an_engine_ends_with_the_thread_that_all_its_answers_come_from() -> None:
    program = (
        "from serving.engine.served_model import *\nstart_thread(exit)\nthreading.Event().wait()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=WAIT_SECONDS
    )
    assert ended.returncode == BROKEN_EXIT_CODE and b"SystemExit" in ended.stderr


@pytest.mark.parametrize("engine", ["openvino", "transformers"])
def test_tokens_have_the_log_probabilities_that_transformers_gives_them(
    engine: Engine, tiny_model_folder: Path, loaded: Loader
) -> None:
    model = loaded(tiny_model_folder, engine)
    whole = answer(model, ask(logprobs=True, echo=True))
    assert whole.echo == PROMPT and whole.completion_tokens == 12
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    prompt = torch.tensor([model.tokenizer.encode(PROMPT)])
    written = reference.generate(prompt, max_new_tokens=12, do_sample=False)
    with torch.no_grad():
        expected = (
            reference(written).logits[0, :-1].log_softmax(-1).gather(-1, written[0, 1:, None])
        )
    assert whole.scores[0].logprob is None
    found = torch.tensor([score.logprob for score in whole.scores[1:]])
    torch.testing.assert_close(found, expected[:, 0], atol=1e-4, rtol=0)
    assert "".join(score.token for score in whole.scores) == model.tokenizer.decode(
        written[0].tolist()
    )
    assert not any(score.top for score in whole.scores), "nobody asked"


@pytest.mark.parametrize("new", [0, 1])
@pytest.mark.parametrize("engine", ["openvino", "transformers"])
def test_places_of_a_prompt_have_their_most_likely_tokens(
    engine: Engine, new: int, tiny_model_folder: Path, loaded: Loader
) -> None:
    model = loaded(tiny_model_folder, engine)
    prompt = model.tokenizer.encode(" ".join(tiny_texts(3)))[:140]
    found = answer(model, ask(prompt, max_tokens=new, logprobs=True, echo=True, top=3)).scores
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    with torch.no_grad():
        logprobs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected, tops = (part[: len(prompt) - 1 + new] for part in logprobs.topk(3))
    assert found[0].logprob is None and not found[0].top
    likely = [score.top for score in found[1:]]
    assert [[bytes(one.bytes) for one in three] for three in likely] == [
        [model.tokenizer.token_bytes(token) for token in three] for three in tops.tolist()
    ]
    told = torch.tensor([[one.logprob for one in three] for three in likely])
    torch.testing.assert_close(told, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("engine", ["openvino", "transformers"])
def test_what_is_drawn_has_its_own_and_the_likeliest_tokens(
    engine: Engine, tiny_model_folder: Path, loaded: Loader
) -> None:
    model = loaded(tiny_model_folder, engine)
    hot = ask(temperature=1.5, seed=3, logprobs=True, top=2, ignore_eos=True)
    whole = answer(model, hot)
    assert len(whole.scores) == whole.completion_tokens == 12
    for score in whole.scores:
        first, second = score.top
        assert first.logprob is not None and second.logprob is not None
        assert score.logprob is not None and first.logprob >= second.logprob
        assert score.logprob <= first.logprob + 1e-6
    assert any(score.bytes != score.top[0].bytes for score in whole.scores)


SCRIPTS = {
    "Latin": "The naïve valve",
    "Cyrillic": "Клапан закрыт",
    "Greek": "βαλβίδα κλείνει",
    "Arabic": "الصمام مغلق",
    "Hebrew": "השסתום סגור",
    "Devanagari": "वाल्व बंद है",
    "Thai": "วาล์วปิดอยู่",
    "Han and kana": "漢字混じりの文",
    "Hangul": "밸브가 닫혔다",
    "emoji": "👩‍🔧🔧 � �",
}


@pytest.mark.parametrize("engine", ["openvino", "transformers"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_tokens_together_are_the_text_and_each_name_is_one_tokens(
    engine: Engine, script: str, tiny_model_folder: Path, loaded: Loader
) -> None:
    """The tiny tokenizer spreads every character that is not ASCII over several tokens."""
    model, text = loaded(tiny_model_folder, engine), SCRIPTS[script]
    whole = answer(model, ask(text, max_tokens=0, logprobs=True, echo=True, top=5))
    assert whole.echo == "".join(score.token for score in whole.scores) == text
    assert b"".join(bytes(score.bytes) for score in whole.scores) == text.encode()
    ends = [score.offset + len(score.token) for score in whole.scores]
    assert [score.offset for score in whole.scores] == [0, *ends[:-1]] and ends[-1] == len(text)
    for score in whole.scores[1:]:
        assert len({one.token for one in score.top}) == 5
        for one in score.top:
            assert (one.token == score.token) == (one.bytes == score.bytes)


@pytest.mark.parametrize("begins", ["with a space", "with a token of its own"])
def test_tokens_are_the_text_where_the_tokenizer_adds_to_it(begins: str) -> None:
    """One of SentencePiece: a word's token has the space before it, the first word's too."""
    vocabulary = {"<s>": 0, "<unk>": 1, "▁the": 2, "▁valve": 3, "s": 4}
    vocabulary |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    backend = Tokenizer(BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens(["<s>"])
    tokens, text = [2, 3, 4, *(5 + byte for byte in "漢".encode())], "the valves漢"
    if begins == "with a token of its own":
        tokens = [0, *tokens]
    texts = TokenTexts(ServedTokenizer(backend), text, len(tokens), 0)
    told = [texts.score(TokenLikelihood(token, -1.0)) for token in tokens]
    assert [one.token for one in told][-6:] == ["the", " valve", "s", "", "", "漢"]
    assert "".join(one.token for one in told) == text
    assert told[-1].bytes == [0xA2] and told[-1].offset == len(text) - 1


@pytest.mark.parametrize("engine", ["openvino", "transformers"])
def test_prompt_of_tokens_alone_is_scored_and_nothing_written(
    engine: Engine, tiny_model_folder: Path, loaded: Loader
) -> None:
    model = loaded(tiny_model_folder, engine)
    text = answer(model, ask(max_tokens=0, logprobs=True, echo=True))
    tokens = model.tokenizer.encode(PROMPT)
    same = answer(model, ask(tokens, max_tokens=0, logprobs=True, echo=True))
    assert same == text
    assert same.text == "" and same.completion_tokens == 0 and len(same.scores) == len(tokens)
    with pytest.raises(Refused, match="not in this model's vocabulary"):
        model.encode(ask([model.tokenizer.backend.get_vocab_size()]))


@pytest.mark.parametrize("engine", ["openvino", "transformers"])
def test_requests_of_one_batch_are_answered_as_if_alone(
    engine: Engine, tiny_model_folder: Path, loaded: Loader
) -> None:
    model = loaded(tiny_model_folder, engine)
    requests = [ask("Each gauge " * n, max_tokens=4 + n, stream=False) for n in range(1, 7)]

    async def together() -> list[list[Chunk]]:
        return await asyncio.gather(*(chunks_of(model, request) for request in requests))

    alone = [answer(model, request) for request in requests]
    assert [chunks[-1] for chunks in asyncio.run(together())] == alone
    assert [one.completion_tokens for one in alone] == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("engine", ["openvino", "transformers"])
def test_a_request_may_ask_to_write_past_the_models_end(
    engine: Engine, tiny_model_folder: Path, loaded: Loader, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    every = {"eos_token_id": list(range(config["vocab_size"]))}
    (folder / "generation_config.json").write_text(json.dumps(every))
    model = loaded(folder, engine)
    ends, goes_on = (answer(model, ask(ignore_eos=asked)) for asked in (False, True))
    assert (ends.completion_tokens, ends.finish_reason) == (1, "stop")
    assert (goes_on.completion_tokens, goes_on.finish_reason) == (12, "length")


@pytest.mark.parametrize("engine", ["openvino", "transformers", "sequence to sequence"])
def test_model_stops_writing_when_the_caller_goes_away(
    engine: str, tiny_model_folder: Path, sequence_to_sequence_folder: Path, loaded: Loader
) -> None:
    """A model that went on would keep the next one, who asks for little, waiting for long."""
    is_causal = engine in ("openvino", "transformers")
    folder = tiny_model_folder if is_causal else sequence_to_sequence_folder
    model = loaded(folder, engine if is_causal else "auto")  # type: ignore[arg-type]

    async def leave_after_first_piece() -> int:
        request = ask(max_tokens=TOKENS)
        tokens, jobs = model.encode(request), []
        submit = model.submit

        def noted(request: GenerateRequest, tokens: list[int]) -> Job:
            jobs.append(submit(request, tokens))
            return jobs[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "submit", noted)
            async with aclosing(model.generate(request, tokens)) as chunks:
                async for _ in chunks:
                    break
            (*_, last) = await chunks_of(model, ask(max_tokens=2))
        assert last.completion_tokens <= 2
        return jobs[0].outputs.qsize()

    assert asyncio.run(leave_after_first_piece()) < TOKENS / 2, "of what nobody took"


def test_callers_who_go_away_at_any_moment_break_nothing(
    tiny_model_folder: Path, loaded: Loader
) -> None:
    """Threads take turns far more often than usual, so that every moment comes up."""
    model = loaded(tiny_model_folder, "openvino")
    usual = sys.getswitchinterval()
    generator = random.Random(1)

    async def leave(seconds: float) -> None:
        request = ask(max_tokens=TOKENS)
        tokens = model.encode(request)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), aclosing(model.generate(request, tokens)) as all_:
                async for _ in all_:
                    pass

    async def come_and_go() -> None:
        for _ in range(GROUPS):
            await asyncio.gather(*(leave(generator.random() / 40) for _ in range(8)))

    sys.setswitchinterval(1e-6)
    try:
        asyncio.run(come_and_go())
    finally:
        sys.setswitchinterval(usual)
    assert answer(model, ask()).text


def test_event_loop_has_its_turns_between_two_steps(
    tiny_model_folder: Path, loaded: Loader
) -> None:
    """A step holds Python's lock; with a turn for each, a request would wait for a step a turn."""
    model = loaded(tiny_model_folder, "openvino")
    request = ask(max_tokens=50, ignore_eos=True)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def turns_at_each_step() -> list[int]:
        counting = asyncio.create_task(count())
        found = [turns async for _ in model.generate(request, model.encode(request))]
        counting.cancel()
        return found

    found = asyncio.run(turns_at_each_step())
    assert statistics.median(b - a for a, b in pairwise(found)) >= TURNS


@pytest.mark.parametrize("engine", ["openvino", "transformers"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_text_that_predicts_from_every_position_is_scored(
    engine: Engine, architecture: str, tiny_model_folder: Path, tmp_path: Path, loaded: Loader
) -> None:
    """It has one token more than the model has positions, as windows of the evaluation have."""
    write_model(architecture, tmp_path / architecture, tiny_model_folder)
    model = loaded(tmp_path / architecture, engine)
    most = model.context_tokens
    tokens = [5 + number % 90 for number in range(most + 1)]
    scored = ask(tokens, max_tokens=0, max_prompt_tokens=most + 1, echo=True, logprobs=True)
    scores = answer(model, scored).scores
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / architecture)
    with torch.no_grad():
        logprobs = reference(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert [one.logprob for one in scores[1:]] == pytest.approx(expected, abs=1e-3)
    with pytest.raises(Refused, match=f"at most {most + 1} fit"):
        model.encode(scored.model_copy(update={"prompt": [*tokens, 5], "max_prompt_tokens": 9_999}))


def test_engine_is_named_with_its_reason(
    tiny_model_folder: Path, sequence_to_sequence_folder: Path, conversions: Path, tmp_path: Path
) -> None:
    def choose(folder: Path, **changes: object) -> str:
        return choose_engine(folder, SETTINGS.model_copy(update=changes), conversions).reason

    assert choose(tiny_model_folder) == "openvino"
    assert choose(tiny_model_folder, engine="transformers") == "transformers"
    assert "encoder-decoder" in choose(sequence_to_sequence_folder)
    with pytest.raises(UserError, match=r"endpoint\.engine.*encoder-decoder"):
        choose(sequence_to_sequence_folder, engine="openvino")
    with pytest.raises(UserError, match=r"`endpoint\.weights` is int8.*encoder-decoder.*Set bf16"):
        choose(sequence_to_sequence_folder, weights="int8")
    windowed = shutil.copytree(tiny_model_folder, tmp_path / "windowed")
    config = json.loads((windowed / "config.json").read_text()) | {"sliding_window": 64}
    (windowed / "config.json").write_text(json.dumps(config))
    assert "sees 64 tokens back" in choose(windowed)


def test_format_of_weights_that_the_engine_lacks_is_refused(
    tiny_model_folder: Path, conversions: Path
) -> None:
    settings = SETTINGS.model_copy(update={"engine": "transformers", "weights": "int4"})
    with pytest.raises(UserError, match=r"int4, which openvino alone has.*is transformers.*bf16"):
        choose_engine(tiny_model_folder, settings, conversions)


def test_what_another_version_of_the_engine_converted_is_not_taken(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    newer = tmp_path / "packages" / "openvino-9999.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: openvino\nVersion: 9999\n")

    def key(packages: str) -> str:
        """In a process that finds these packages before those of the environment."""
        arguments = (str(tiny_model_folder), SETTINGS.model_dump_json(), str(tmp_path))
        return subprocess.run(
            [sys.executable, "-c", KEY_PROGRAM, *arguments],
            env=os.environ | {"PYTHONPATH": packages},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert key("") != key(str(newer.parent))


def test_conversion_is_made_once_and_again_when_it_is_damaged(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    first = choose_engine(tiny_model_folder, SETTINGS, tmp_path)
    made = sorted(file.stat().st_ino for file in tmp_path.glob("*/*"))
    again = choose_engine(tiny_model_folder, SETTINGS, tmp_path)
    assert sorted(file.stat().st_ino for file in tmp_path.glob("*/*")) == made
    assert first.converted is not None and first.converted == again.converted
    files = {file.name: file.read_bytes() for file in first.converted.iterdir()}
    weights = first.converted / "openvino_model.bin"
    weights.write_bytes(files[weights.name][:-1] + b"\x00")
    assert choose_engine(tiny_model_folder, SETTINGS, tmp_path) == first
    assert {file.name: file.read_bytes() for file in first.converted.iterdir()} == files
