"""Writes the table of docs/models.md from tiny models in the layout of the published ones:
`python -m tests.published_models`.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from artifacts.errors import UserError
from recipes.data.batch import IGNORED, ExampleBatch
from recipes.encoders.classification import load_classifier
from recipes.encoders.masked import HIDDEN, lay_out, load_masked
from recipes.model.base_model import BaseModelSettings, prepare
from recipes.model.causal_model import load_model
from recipes.sequence_to_sequence.objective import load_sequence_to_sequence
from recipes.settings import ModelFamily
from tests.old_tokenizers import SENTENCEPIECE, write_old_tokenizer
from tests.recipes.model.architectures import tiny_config, write_tiny
from tests.tiny import tiny_base_model

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
LARGEST_DIFFERENCE = 1e-5
TABLE = "|---|---|---|---|---|\n"
RECIPES: dict[ModelFamily, tuple[str, ...]] = {
    "causal": ("continued_pretraining, pretraining, fine_tuning",),
    "sequence_to_sequence": ("sequence_to_sequence",),
    "encoder": ("masked_language_modeling", "classification"),
}


@dataclass(frozen=True)
class Published:
    """A family of models as it lies on the Hub."""

    name: str
    kind: str
    """Its `model_type`."""
    tokenizer: str | None = None
    """Which of the older tokenizers it has; `tokenizer.json` where None."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of its config, beside the sizes."""
    family: ModelFamily = "causal"


def _encoder_decoder(
    name: str, kind: str, tokenizer: str | None = None, **changes: Any
) -> Published:
    changes |= {"decoder_start_token_id": 0}
    return Published(name, kind, tokenizer, changes, "sequence_to_sequence")


def _encoder(name: str, kind: str, tokenizer: str | None = None, **changes: Any) -> Published:
    return Published(name, kind, tokenizer, changes, "encoder")


GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FAMILIES = (
    Published("GPT-2", "gpt2"),
    Published("OPT", "opt", "opt"),
    Published("GPT-Neo", "gpt_neo", "gpt2"),
    Published("GPT-J", "gptj"),
    Published("Pythia, GPT-NeoX", "gpt_neox"),
    Published("BLOOM", "bloom"),
    Published("Falcon", "falcon"),
    Published("MPT", "mpt"),
    Published("Llama 2", "llama", "llama"),
    Published("Llama 3, SmolLM2", "llama", changes={"tie_word_embeddings": True}),
    Published("Mistral", "mistral", "mistral", {"sliding_window": None}),
    Published("Mixtral", "mixtral", "mistral", {"sliding_window": None}),
    Published("Qwen2, Qwen2.5", "qwen2"),
    Published("Qwen3", "qwen3"),
    Published("Qwen3 MoE", "qwen3_moe"),
    Published("Gemma", "gemma", "gemma"),
    Published("Gemma 2", "gemma2"),
    Published("Gemma 3", "gemma3_text"),
    Published("Phi-1.5, Phi-2", "phi"),
    Published("Phi-3", "phi3"),
    Published("StableLM", "stablelm"),
    Published("OLMo", "olmo"),
    Published("OLMo 2", "olmo2"),
    Published("StarCoder2", "starcoder2"),
    Published("Granite", "granite"),
    Published("Command R", "cohere"),
    Published("SmolLM3", "smollm3"),
    Published("gpt-oss", "gpt_oss"),
    Published("DeepSeek-V3", "deepseek_v3"),
    Published("Mamba", "mamba"),
    Published("Jamba", "jamba"),
    _encoder_decoder("T5", "t5", "t5"),
    _encoder_decoder("T5 v1.1, FLAN-T5", "t5", "t5", **GATED),
    _encoder_decoder("mT5", "mt5", "mt5", **GATED),
    _encoder_decoder("BART", "bart", "bart"),
    _encoder_decoder("Marian (OPUS-MT)", "marian", "marian"),
    _encoder_decoder("Pegasus", "pegasus"),
    _encoder_decoder("LED", "led"),
    _encoder("BERT", "bert"),
    _encoder("RoBERTa", "roberta", "roberta"),
    _encoder("XLM-R", "xlm-roberta", "xlm-roberta"),
    _encoder("DistilBERT", "distilbert"),
    _encoder("ELECTRA", "electra"),
    _encoder("DeBERTa v3", "deberta-v2", "deberta-v2"),
    _encoder("ALBERT", "albert"),
    _encoder("CamemBERT", "camembert"),
    _encoder("ModernBERT", "modernbert"),
)


def rows(published: Published, folder: Path) -> list[str]:
    """The lines of the page about a family; raises AssertionError where its loss is another."""
    source, made = folder / "source", folder / "made"
    form = _write(published, source)
    about = f"| {published.name} | `{published.kind}` | {form} |"
    recipes = RECIPES[published.family]
    try:
        settings = BaseModelSettings(folder=str(source))
        prepare(settings, made, lambda line: None, published.family)
    except UserError as error:
        return [f"{about} {', '.join(recipes)} | {_reason(error, source, made)} |"]
    outcomes: dict[str, list[str]] = {}
    for recipe, compare in zip(recipes, COMPARED[published.family], strict=True):
        outcomes.setdefault(_outcome(compare, source, made), []).append(recipe)
    return [f"{about} {', '.join(ones)} | {outcome} |" for outcome, ones in outcomes.items()]


def page() -> str:
    """The whole page, with its own words and a table of what happens now."""
    words, line, _ = PAGE.read_text().partition(TABLE)
    found = []
    for published in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found += rows(published, Path(folder))
    return words + line + "\n".join(found) + "\n"


def _write(published: Published, folder: Path) -> str:
    """Write a family's folder and return how its tokenizer is called there."""
    import transformers
    from transformers import AutoTokenizer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto = {
        "causal": "AutoModelForCausalLM",
        "sequence_to_sequence": "AutoModelForSeq2SeqLM",
        "encoder": "AutoModelForMaskedLM",
    }[published.family]
    kind, form = published.tokenizer, "`tokenizer.json`"
    vocab_size = 600
    if kind is None:
        tiny_base_model(folder)
        (folder / "model.safetensors").unlink()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        tokenizer.save_pretrained(folder)
    elif kind == "marian":
        folder.mkdir()
        form = "`source.spm`, `target.spm`"
    else:
        vocab_size = write_old_tokenizer(folder, kind)
        form = (
            f"`{SENTENCEPIECE[kind][0]}`" if kind in SENTENCEPIECE else "`vocab.json`, `merges.txt`"
        )
    changes = {} if published.family == "causal" else {"is_decoder": False}
    changes |= {"vocab_size": vocab_size} | published.changes
    config = tiny_config(CONFIG_MAPPING[published.kind], **changes)
    write_tiny(config, folder, getattr(transformers, auto))
    return form


def _outcome(compare: Callable[[Path], tuple[float, float]], source: Path, made: Path) -> str:
    try:
        ours, own = compare(made)
    except UserError as error:
        return _reason(error, source, made)
    assert abs(ours - own) <= LARGEST_DIFFERENCE * abs(own), (ours, own)
    return "exact"


def _reason(error: UserError, *folders: Path) -> str:
    said = str(error).removeprefix("`base_model`: ").partition(". ")[0]
    for folder in folders:
        said = said.replace(str(folder), "the folder")
    return "refused: " + " ".join(said.split())


def _texts() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randint(8, 400, (length,)) for length in (29, 35)]


def _causal(folder: Path) -> tuple[float, float]:
    from transformers import AutoModelForCausalLM

    from tests.recipes.model.test_architectures import packed

    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = _texts()
    with torch.no_grad():
        expected = sum(
            float(own(input_ids=text[None], labels=text[None]).loss) * (len(text) - 1)
            for text in texts
        )
        return float(load_model(folder).train()(packed(texts))), expected


def _sequence_to_sequence(folder: Path) -> tuple[float, float]:
    from transformers import AutoModelForSeq2SeqLM

    own = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    first, second = _texts()
    tokens = torch.stack([first, second[: len(first)]])
    is_input = torch.arange(tokens.shape[1]) < torch.tensor([[29], [11]])
    targets = torch.tensor([[31, 32, 33], [41, IGNORED, IGNORED]])
    with torch.no_grad():
        model = load_sequence_to_sequence(folder).train()
        ours = float(model(ExampleBatch(tokens, is_input, targets)))
        loss = own(input_ids=tokens, attention_mask=is_input.long(), labels=targets).loss
    return ours, 4 * float(loss)


def _masked(folder: Path) -> tuple[float, float]:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    own = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    mask = AutoTokenizer.from_pretrained(folder).mask_token_id
    shown, targets = [], []
    for text in _texts():
        chosen = torch.arange(len(text)) % 7 == 3
        shown.append(text.masked_fill(chosen, HIDDEN))
        targets.append(text.masked_fill(~chosen, IGNORED))
    batch = lay_out(
        [(one.numpy(), wanted.numpy()) for one, wanted in zip(shown, targets, strict=True)]
    )
    with torch.no_grad():
        ours = float(load_masked(folder).train()(batch))
        expected = 0.0
        for one, wanted in zip(shown, targets, strict=True):
            tokens = one.masked_fill(one == HIDDEN, mask)[None]
            loss = own(input_ids=tokens, labels=wanted[None]).loss
            expected += float(loss) * int((wanted != IGNORED).sum())
    return ours, expected


def _classes(folder: Path) -> tuple[float, float]:
    model = load_classifier(folder, ["no", "yes"], 0, None).train()
    first, second = _texts()
    expected = 0.0
    tokens = torch.stack([torch.nn.functional.pad(first, (0, 6)), second])
    is_input = torch.arange(35) < torch.tensor([[29], [35]])
    with torch.no_grad():
        ours = float(model(ExampleBatch(tokens, is_input, torch.tensor([[0], [1]]))))
        inner: Any = model.network.inner
        for text, label in ((first, 0), (second, 1)):
            expected += float(inner(input_ids=text[None], labels=torch.tensor([label])).loss)
    return ours, expected


COMPARED: dict[ModelFamily, tuple[Callable[[Path], tuple[float, float]], ...]] = {
    "causal": (_causal,),
    "sequence_to_sequence": (_sequence_to_sequence,),
    "encoder": (_masked, _classes),
}

if __name__ == "__main__":
    PAGE.write_text(page())
