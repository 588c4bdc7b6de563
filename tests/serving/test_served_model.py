"""Loaded models as the engine uses them, in this process."""

import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordPiece
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.model.tokenizer_conversion import convert
from serving.engine.openvino_model import TURNS, _RunningRequest
from serving.engine.program import Choice, choose_engine, load_model
from serving.engine.protocol import Chunk, GenerateRequest, Refused
from serving.engine.served_model import (
    BROKEN_EXIT_CODE,
    Job,
    ServedModel,
    ServedTokenizer,
    Step,
    TokenLikelihood,
    TokenTexts,
)
from tests.old_tokenizers import write_old_tokenizer
from tests.serving.conftest import SETTINGS, chunks_of, generate, in_event_loop
from tests.serving.test_architectures import write_model
from tests.tiny import tiny_base_model, tiny_texts
from tests.tiny_models import gpt2
from tests.waiting import WAIT_SECONDS

TOKENS = 150
GROUPS = 100
PROMPT = "The valve"
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


@pytest.fixture(params=["openvino", "transformers"])
def model(request: pytest.FixtureRequest, tiny_model_folder: Path, loaded: Loader) -> ServedModel:
    """The tiny model, by each engine."""
    return loaded(tiny_model_folder, request.param)


def ask(prompt: str | list[int] = PROMPT, **fields: object) -> GenerateRequest:
    plain = {"max_tokens": 12, "max_prompt_tokens": 200, "temperature": 0, "top_p": 1}
    return GenerateRequest.model_validate({"prompt": prompt, **plain, **fields})


def answer(model: ServedModel, request: GenerateRequest) -> Chunk:
    (whole,) = generate(model, request)
    return whole


@torch.no_grad()
def log_probabilities(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What transformers gives after each token, shape (tokens, vocabulary)."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model(tokens[None]).logits[0].log_softmax(-1)


def test_an_engine_ends_with_the_thread_that_all_its_answers_come_from() -> None:
    program = (
        "from serving.engine.served_model import *\nstart_thread(exit)\nthreading.Event().wait()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=WAIT_SECONDS
    )
    assert ended.returncode == BROKEN_EXIT_CODE and b"SystemExit" in ended.stderr


def test_tokens_have_the_log_probabilities_that_transformers_gives_them(
    model: ServedModel, tiny_model_folder: Path
) -> None:
    whole = answer(model, ask(logprobs=True, echo=True))
    assert whole.echo == PROMPT and whole.completion_tokens == 12
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    prompt = torch.tensor([model.tokenizer.encode(PROMPT)])
    (written,) = reference.generate(prompt, max_new_tokens=12, do_sample=False)
    expected = log_probabilities(tiny_model_folder, written[:-1]).gather(-1, written[1:, None])
    assert whole.scores[0].logprob is None
    found = torch.tensor([score.logprob for score in whole.scores[1:]])
    torch.testing.assert_close(found, expected[:, 0], atol=1e-4, rtol=0)
    text = model.tokenizer.decode(written.tolist())
    assert "".join(score.token for score in whole.scores) == text
    assert not any(score.top for score in whole.scores), "nobody asked"


@pytest.mark.parametrize("new", [0, 1])
def test_places_of_a_prompt_have_their_most_likely_tokens(
    model: ServedModel, new: int, tiny_model_folder: Path
) -> None:
    prompt = model.tokenizer.encode(" ".join(tiny_texts(3)))[:140]
    found = answer(model, ask(prompt, max_tokens=new, logprobs=True, echo=True, top=3)).scores
    logprobs = log_probabilities(tiny_model_folder, torch.tensor(prompt))
    expected, tops = (part[: len(prompt) - 1 + new] for part in logprobs.topk(3))
    assert found[0].logprob is None and not found[0].top
    likely = [score.top for score in found[1:]]
    assert [[bytes(one.bytes) for one in three] for three in likely] == [
        [model.tokenizer.token_bytes(token) for token in three] for three in tops.tolist()
    ]
    told = torch.tensor([[one.logprob for one in three] for three in likely])
    torch.testing.assert_close(told, expected, atol=1e-4, rtol=0)


def test_what_is_drawn_has_its_own_and_the_likeliest_tokens(model: ServedModel) -> None:
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


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_tokens_together_are_the_text_and_each_name_is_one_tokens(
    model: ServedModel, text: str
) -> None:
    """The tiny tokenizer spreads every character that is not ASCII over several tokens."""
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


def test_signs_of_a_heading_are_text_and_the_mark_of_a_word_piece_is_none() -> None:
    vocabulary = {"<unk>": 0, "▁A": 1, "##": 2, "###": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    backend = Tokenizer(BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokens, text = [1, 14, 2, 1, 14, 3, 1], "A\n## A\n### A"
    texts = TokenTexts(ServedTokenizer(backend), text, len(tokens), 0)
    told = [texts.score(TokenLikelihood(token, -1.0)) for token in tokens]
    assert [one.token for one in told] == ["A", "\n", "##", " A", "\n", "###", " A"]

    pieces = Tokenizer(WordPiece({"[UNK]": 0, "val": 1, "##ve": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    assert ServedTokenizer(pieces).token_bytes(2) == b"ve"


@pytest.fixture(scope="module")
def spaced_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of SentencePiece, which takes a text's first space away."""
    published, folder = (tmp_path_factory.mktemp("spaced") / name for name in ("old", "model"))
    size = write_old_tokenizer(published, "llama")
    (published / "config.json").write_text(json.dumps({"model_type": "llama"}))
    convert(published, lambda line: None)
    tiny_base_model(folder, vocab_size=size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(published / name, folder)
    return folder


@pytest.mark.parametrize("engine", ["openvino", "transformers"])
def test_first_word_of_an_answer_keeps_its_space(
    spaced_folder: Path, loaded: Loader, engine: Engine
) -> None:
    model = loaded(spaced_folder, engine)
    whole = answer(model, ask(logprobs=True, echo=True))
    assert whole.text.startswith(" ")
    assert "".join(score.token for score in whole.scores) == whole.echo + whole.text
    beginning = answer(model, ask(max_tokens=5))
    rest = answer(model, ask(max_tokens=7, written=beginning.text))
    assert beginning.text + rest.text == whole.text


class Writing(ServedModel):
    """Writes the same whatever it is asked."""

    def __init__(self, tokenizer: ServedTokenizer, tokens: list[int]) -> None:
        self.tokenizer, self.context_tokens, self.end_tokens = tokenizer, TOKENS, []
        self._tokens = tokens

    def submit(self, request: GenerateRequest, tokens: list[int]) -> Job:
        job = Job(request=request, prompt=tokens)
        for number, token in enumerate(self._tokens, 1):
            job.put(Step([token], number == len(self._tokens)))
        return job


def test_a_character_that_is_broken_off_after_a_line_break_spoils_no_answer(
    spaced_folder: Path,
) -> None:
    tokenizer = ServedTokenizer.of(AutoTokenizer.from_pretrained(spaced_folder))
    names = ["▁valve", "<0x0A>", "<0xE6>", "<0x0A>", "▁the", "▁valve", "<0xC3>", "<0xA9>"]
    tokens = [tokenizer.backend.token_to_id(name) for name in names]
    written = answer(Writing(tokenizer, tokens), ask())
    assert written.text == " valve\n\N{REPLACEMENT CHARACTER}\n the valveé"


def test_prompt_of_tokens_alone_is_scored_and_nothing_written(model: ServedModel) -> None:
    text = answer(model, ask(max_tokens=0, logprobs=True, echo=True))
    tokens = model.tokenizer.encode(PROMPT)
    same = answer(model, ask(tokens, max_tokens=0, logprobs=True, echo=True))
    assert same == text
    assert same.text == "" and same.completion_tokens == 0 and len(same.scores) == len(tokens)
    with pytest.raises(Refused, match="not in this model's vocabulary"):
        model.encode(ask([model.tokenizer.backend.get_vocab_size()]))


def test_requests_that_fit_alone_take_no_places_from_each_other(tmp_path: Path) -> None:
    """Of a model with a place for each position, past which it fails."""
    gpt2(tmp_path)
    model = load_model(tmp_path, SETTINGS, Choice("transformers"))
    assert isinstance(model, ServedModel) and model.context_tokens == 256
    whole = {"max_prompt_tokens": 256, "ignore_eos": True}
    asked = ((5, 30), (240, 4), (10, 60), (8, 90))
    requests = [ask([5] * given, max_tokens=most, **whole) for given, most in asked]

    assert generate(model, *requests) == [answer(model, request) for request in requests]


def test_requests_of_one_batch_are_answered_as_if_alone(model: ServedModel) -> None:
    requests = [ask("Each gauge " * n, max_tokens=4 + n) for n in range(1, 7)]
    alone = [answer(model, request) for request in requests]
    assert generate(model, *requests) == alone
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


HOT, COLD = {"temperature": 1.5, "ignore_eos": True}, {"ignore_eos": True}


@pytest.fixture
def texts(tiny_model_folder: Path, loaded: Loader) -> Callable[..., list[str]]:
    """What transformers writes for requests that wait together, each of twelve tokens or fewer."""

    def write(*fields: dict[str, Any]) -> list[str]:
        requests = [ask(**given) for given in fields]
        answers = generate(loaded(tiny_model_folder, "transformers"), *requests)
        assert [one.completion_tokens for one in answers] == [one.max_tokens for one in requests]
        return [one.text for one in answers]

    return write


def test_the_likeliest_token_is_taken_beside_requests_with_a_temperature(
    texts: Callable[..., list[str]],
) -> None:
    (alone,) = texts(COLD)
    beside = texts(HOT, COLD, HOT, COLD | {"max_tokens": 3}, HOT)
    assert beside[1] == alone and alone.startswith(beside[3])
    assert len(set(beside[::2])) == 3


def test_of_the_likely_tokens_alone_is_drawn(texts: Callable[..., list[str]]) -> None:
    assert len(set(texts(HOT | {"top_p": 1e-6}, COLD))) == 1


def test_a_seed_draws_the_same_whatever_stands_beside_it_and_only_for_its_request(
    texts: Callable[..., list[str]],
) -> None:
    seeded, other = HOT | {"seed": 5}, HOT | {"seed": 6}
    (alone,) = texts(seeded)
    assert texts(HOT, seeded, other)[1] == alone
    assert texts(other)[0] != alone
    drawn = set()
    for _ in range(3):
        texts(seeded)
        drawn |= {*texts(HOT)}
    assert len(drawn) > 1, "what has no seed follows from no other request's"


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


def test_a_stop_string_ends_an_answer_that_is_scored_when_it_is_written(
    tiny_model_folder: Path, loaded: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, long = loaded(tiny_model_folder, "openvino"), {"max_tokens": TOKENS, "ignore_eos": True}
    text, submit = answer(model, ask(**long)).text, model.submit
    jobs: list[_RunningRequest] = []
    stop = text[len(text) // 5 :][:5]

    def noted(request: GenerateRequest, tokens: list[int]) -> Job:
        job = submit(request, tokens)
        assert isinstance(job, _RunningRequest)
        jobs.append(job)
        return job

    monkeypatch.setattr(model, "submit", noted)
    stopped = answer(model, ask(logprobs=True, top=2, stop=[stop], **long))
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    assert len(stopped.scores) == stopped.completion_tokens == len(jobs[0].written) < TOKENS / 2


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


@in_event_loop
async def test_event_loop_has_its_turns_between_two_steps(
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

    counting = asyncio.create_task(count())
    found = [turns async for _ in model.generate(request, model.encode(request))]
    counting.cancel()
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
    logprobs = log_probabilities(tmp_path / architecture, torch.tensor(tokens[:-1]))
    expected = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert [one.logprob for one in scores[1:]] == pytest.approx(expected, abs=1e-3)
    with pytest.raises(Refused, match=f"at most {most + 1} fit"):
        model.encode(scored.model_copy(update={"prompt": [*tokens, 5], "max_prompt_tokens": 9_999}))
