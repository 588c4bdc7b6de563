"""Settings: every fault is named with its key and what was expected."""

import os
import re
from pathlib import Path

import pytest
import yaml
from dagster import ScheduleDefinition

from artifacts.errors import UserError
from llm_assets.config import changed_settings, config_path, load_settings

MINIMAL = """
name: manuals
raw_corpus:
  sources:
    - {type: files, name: manuals, path: manuals}
base_model: {folder: model}
"""


def source(settings: str) -> str:
    """A section whose one source has these settings."""
    given = {"type": "files", "path": "x"} | yaml.safe_load(settings)
    return yaml.safe_dump({"raw_corpus": {"sources": [given]}})


def write(folder: Path, text: str) -> Path:
    path = folder / "pipeline.yaml"
    path.write_text(text)
    return path


def test_the_shipped_pipeline_files_are_valid() -> None:
    files = sorted(
        path for path in Path("config").glob("*.yaml") if path.name != "google_cloud.yaml"
    )
    assert Path("config/invented_products.yaml") in files
    for path in files:
        assert load_settings(path).name == path.stem


def test_a_task_may_be_called_like_the_exam(tmp_path: Path) -> None:
    own = "eval_metrics: {tasks: [{name: exam_of_law}]}"
    floor = "model_version: {gate: {floors: {exam_of_law_acc: 0.5}}}"
    assert load_settings(write(tmp_path, f"{MINIMAL}{own}\n{floor}")).exam is None


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("stroe: elsewhere", "stroe: unknown key; did you mean `store`?"),
        ("version: 99", "version: unknown key; Valid here: automation"),
        ("checkpoint: {learning_rate: 1}", "key; did you mean `optimizer.learning_rate`\\? Valid"),
        (
            "raw_corpus: {sources: [{type: fles, path: x}]}",
            "sources.0.type: unknown type fles; did you mean `files`\\? "
            "Types: bigquery, facts, files, hugging_face, package_docs.",
        ),
        (
            "raw_corpus: {sources: [{type: facts, facts: a.csv, forms: b.yaml}]}",
            r"sources\.0\.path: missing\.\n.*sources\.0\.facts: unknown key; .*path",
        ),
        ("raw_corpus: {sources: [{path: x}]}", "sources.0: `type` is missing. Types: bigquery,"),
        (source("examples: {text_column: t}"), "`form` is missing. Forms: conversations, labeled"),
        (source("examples: {form: pair}"), "unknown form pair; did you mean `pairs`\\? Forms:"),
        (source("text_colum: body"), r"sources\.0\.text_colum.*mean `text_column`"),
        (
            "checkpoint: {optimizer: {learing_rate: 1}}",
            "optimizer.learing_rate.*did you mean `learning_rate`",
        ),
        ("checkpoint: {schedule: {warmup: 1}}", "schedule.warmup.*did you mean `warmup_steps`"),
        ("checkpoint: {budget: {steps: many}}", "checkpoint.budget.steps: .*got 'many'"),
        (
            "checkpoint: {budget: {steps: true}}",
            "checkpoint.budget.steps: must be a number; YAML reads on",
        ),
        ("tokenized_shards: {mixing: {manuals: {weight: on}}}", "manuals.weight: must be a number"),
        ("checkpoint: {budget: {steps: 1e3}}", "steps: must be a whole number in digits"),
        ("checkpoint: {optimizer: {learning_rate: a}}", r"learning_rate: must be a number \(got"),
        ("raw_corpus: ", "raw_corpus: has no value. Write one; a key that is left out"),
        ("checkpoint: [3]", r"checkpoint: must be a mapping of keys \(in YAML: .*\)$"),
        ("raw_corpus: {sources: {a: b}}", "sources: must be a list .* begins with `- `"),
        ("raw_corpus: {sources: [manuals]}", r"sources.0: must be a mapping of keys \(in YAML"),
        (source("path: ''"), "path: the path is empty; for the current folder, write a dot"),
        ("store: ' '", "store: the path is empty"),
        ("store: ${HOME}/store", r"store: \$\{HOME\} is not filled in here; write its value, or"),
        ("store: gs://$BUCKET/store", r"store: \$BUCKET is not filled in here"),
        ("store: ~absent/store", "store: this machine has no user 'absent'; your own home .* ~/"),
        ("base_model: {folder: $MODELS}", r"base_model\.folder: \$MODELS is not filled in here"),
        (
            "name: Manuals",
            r"name: a pipeline's name is at most 63 .*, such as 'manuals' \(got 'Manuals'",
        ),
        (source("text_template: [3]"), r"sources\.0\.text_template\.0: must be a valid string"),
        (source("text_column: 2024-05-17"), r"YAML reads digits as a number or a date: put a text"),
        (
            "notifications: {webhook_variable: 'https://hooks.example/SECRET'}",
            "webhook_variable: must be the name of an environment variable$",
        ),
        ("notifications: 'https://hooks.example/SECRET'", r"must be a mapping .* indented\)$"),
        ("notifications: {webhook_variable: 1234}", "webhook_variable: must be a valid string$"),
        (
            "checkpoint: {placement: {deepspeed: {stage: true}}}",
            "placement.deepspeed.stage: must be a number",
        ),
        ("platform: moon", "platform: .*'local' or 'google_cloud'"),
        ("platform: google_cloud", r"jobs on Google Cloud cannot read `store`.*gs://BUCKET/PREFIX"),
        ("training: {runner: google_batch}", "jobs on Google Cloud cannot read `store`"),
        ("platform: google_cloud\nname: docs_", "'docs_', which may not end with an underscore"),
        (f"name: {'a' * 64}", "name: .* at most 63 lowercase letters"),
        ("checkpoint: {placement: {device: [tpu]}}", "placement.device.name: nothing of this name"),
        (
            "model_version: {gate: {metric: exam}}",
            "`model_version.gate.metric` asks for an exam, but there is no section `exam`",
        ),
        (
            "model_version: {gate: {floors: {exam_closed_book_acc: 0.5}}}",
            "`model_version.gate.floors.exam_closed_book_acc` asks for an exam, but there is no",
        ),
        (
            "eval_metrics: {tasks: [{name: arc_easy}]}\n"
            "model_version: {gate: {floors: {arc_esay_acc: 0.5, held_out_perplexity: 1}}}",
            "`model_version.gate.floors.arc_esay_acc` is no metric of this pipeline, so nothing",
        ),
        (
            "checkpoint: {recipe: masked_language_modeling}\n"
            "exam: {facts: f.csv, forms: f.yaml}\n"
            "model_version: {gate: {floors: {exam_closed_book_acc: 0.5}}}",
            "take out `model_version.gate.floors.exam_closed_book_acc`, so that held-out",
        ),
        (
            "model_version: {gate: {metric: exam}}\nexam: {facts: f.csv, forms: f.yaml}\n"
            "endpoint: {weights: int8}",
            "tests the unquantized weights, but `endpoint.weights` serves int8; leave it out",
        ),
        (
            "automation: {least_coverage: 0.9}\ncheckpoint: {recipe: pretraining}",
            "the recipe pretraining begins with random weights.*take out `automation.least_cov",
        ),
        (
            "automation: {least_coverage: 0.9, continue_from_champion: false}",
            "needs runs that continue from one another; take it out, or set `automation.cont",
        ),
        (
            "checkpoint: {recipe: masked_language_modeling}\n"
            "exam: {facts: f.csv, forms: f.yaml}\nmodel_version: {gate: {metric: exam}}",
            "masked_language_modeling and its settings, .* answer no questions, .*; take out "
            "`model_version.gate.metric`, so that held-out examples decide$",
        ),
        (
            "checkpoint: {recipe: fine_tuning, exact_match: {}}\n"
            "raw_corpus: {sources: [{type: files, path: x, examples: {form: conversations}}]}\n"
            "eval_metrics: {tasks: [{name: arc_easy}]}\n"
            "model_version: {gate: {floors: {arc_easy_acc: 0.5, held_out_exact_match: 0.5}}}",
            "take out `model_version.gate.floors.arc_easy_acc`, so that",
        ),
        (
            "checkpoint: {recipe: fine_tuning, exact_match: {}}\nendpoint: {weights: int4}\n"
            "raw_corpus: {sources: [{type: files, path: x, examples: {form: conversations}}]}",
            "the recipe's metric is no loss, so the gate tests .* `endpoint.weights` serves int4",
        ),
        ("endpoint: {engine: vllm}", "endpoint.engine: .*'auto', 'openvino' or .*'vllm'"),
        (
            "clean_corpus: {split: {sources: {manual: replay}}}",
            "`clean_corpus.split.sources` names the source 'manual', which is not among "
            "`raw_corpus.sources`; did you mean `manuals`\\? Sources: manuals$",
        ),
        (
            "tokenized_shards: {mixing: {stud: {weight: 2}}}\nstudy: {}",
            "`tokenized_shards.mixing` names .* 'stud', .* `study`\\? Sources: manuals, study$",
        ),
        (
            "tokenized_shards: {mixing: {study: {weight: 2}}}",
            "`tokenized_shards.mixing` names .* 'study', .*; Sources: manuals$",
        ),
        (
            "tokenized_shards: {mixing: {manuals: {weight: 2}}}\n"
            "clean_corpus: {split: {sources: {manuals: held_out}}}",
            "'manuals', which has no training text, since `clean_corpus.split.sources` assigns it "
            "to `held_out`; take it out of one of them$",
        ),
        (
            "checkpoint: {recipe: classification}\n"
            "raw_corpus: {sources: [{type: files, path: x, name: general}]}\n"
            "clean_corpus: {split: {sources: {general: replay}}}",
            "classification learns from labeled texts, beside which no plain text can be replayed; "
            "take the assignments to `replay` \\(general\\) out of",
        ),
        (
            "checkpoint: {recipe: fine_tuning}",
            "learns from conversations, but the source 'manuals' contains plain text; set its "
            "`examples` to .*, or assign it to `train` in `clean_corpus.split.sources`, where all",
        ),
        (
            "checkpoint: {recipe: classification}\n"
            "clean_corpus: {split: {sources: {manuals: train}}}",
            "'manuals' contains plain text; .* or take it out: no plain text is learned beside",
        ),
        (
            "checkpoint: {replay_share: 0.25}",
            "`checkpoint.replay_share` is 0.25, but no source .* `replay` .* Sources: manuals$",
        ),
        ("eval_metrics: {tasks: [{name: mmlu, shot: 5}]}", "tasks.0.shot: .*mean `shots`"),
        ("endpoint: {engine: {comand: [a]}}", "endpoint.engine.comand: .*did you mean `command`"),
        ("endpoint: {engine: {command: [vllm, serve]}}", r"give a command with \{port\} in it"),
        (source("name: ' '"), "name: must not be blank"),
        ('store: "a\\0b"', "store: .*the character NUL has no place in a path"),
        ("endpoint: {host: 'http://127.0.0.1:8000'}", "host: must be a name or .* `endpoint.port`"),
        ("endpoint: {host: '127.0.0.1:8000'}", "endpoint.host: must be a name or an IP"),
        ("endpoint: {host: '127.0.0.1 '}", "endpoint.host: must be a name or an IP"),
        ("endpoint: {host: ''}", "endpoint.host: must be a name or an IP"),
        ("endpoint: {allowed_origins: ['*']}", "allowed_origins.0: must be an origin"),
        ("endpoint: {allowed_origins: [page.example]}", "allowed_origins.0: must be an origin"),
        ("endpoint: {allowed_origins: ['https://a.example/b']}", "with no path or pattern"),
        ("endpoint: {journal: {days: .inf}}", "journal.days: must be a finite number"),
        ("owners: [data-team]", "owners.0: 'data-team' is no e-mail .* write `team:data-team`"),
        ("retrain_cron: every monday", "retrain_cron: is not a cron expression; .*'every monday'"),
        ("automation: {observe_cron: 0 3 * *}", "automation.observe_cron: is not a cron"),
        ("retention: {cron: 60 3 * * 1}", "retention.cron: is not a cron expression"),
        *(
            (f"retrain_cron: '{cron}'", "retrain_cron: is not a cron expression")
            for cron in ("@every 5m", "0 3 * * * 1", "0 3 l/2 * *", "0 3 * * 1#2-3", "0 3 * * 1,l2")
        ),
        ("retrain_cron: 0 3 30 feb *", "retrain_cron: names a day that no year has"),
        *(
            (
                f"notifications: {{email: {{host: h, sender: {sender}, to: [a@b.c]}}}}",
                r"email\.sender: must be an e-mail address in one line, such as team@example.com",
            )
            for sender in ("nobody", '"Ada\\n<a@b.c>"', '"a@b.c\\n"')
        ),
        ("description: no", r"\(got False\)\. YAML reads .* in quotes"),
        ("platform: on", r"\(got True\)\. YAML reads .* in quotes"),
        (
            "clean_corpus: {split: {sources: {no: train}}}",
            r"\(got False\)\. YAML reads .* in quotes",
        ),
        (source("path: 's3://a/b'"), r"sources\.0\.path: s3:// is not .* gs://bucket/path"),
        ("key_prefix: '2nd'", r"key_prefix: .*\(got '2nd'\)"),
        (
            "spark: {driver_memory: 4GB}",
            r"spark.driver_memory: .*\(got '4GB'\)\. Heap size .* `4g`",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, addition: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        content = yaml.safe_load(MINIMAL) | yaml.safe_load(addition)
        load_settings(write(tmp_path, yaml.safe_dump(content)))


@pytest.mark.parametrize(
    "expression", ["@daily", "0 3 L * MON-FRI", "0 3 1,25-l * *", "0 3 1-l/2 * *", "0 3 * * l5,5#2"]
)
def test_a_cron_expression_that_is_accepted_is_one_that_dagster_takes(
    tmp_path: Path, expression: str
) -> None:
    settings = load_settings(write(tmp_path, f"{MINIMAL}retrain_cron: '{expression}'"))
    assert ScheduleDefinition(cron_schedule=settings.retrain_cron, job_name="retrain")


def test_a_local_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    text = MINIMAL.replace("folder: model", "folder: ~/model")
    assert load_settings(write(tmp_path, text)).base_model.folder == "/home/ada/model"


@pytest.mark.parametrize("said", ["off", "'off'"])
def test_a_journal_that_keeps_nothing_is_said_as_documented(tmp_path: Path, said: str) -> None:
    addition = f"endpoint: {{journal: {{keep: {said}}}}}"
    assert load_settings(write(tmp_path, MINIMAL + addition)).endpoint.journal.keep == "off"


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL.replace("path: manuals", "path: 'URL'"),
        MINIMAL.replace("files, name: manuals, path: manuals", "hugging_face, dataset: 'URL'"),
        MINIMAL.replace("type: files, name: manuals, path: manuals", "type: 'URL'"),
        MINIMAL.replace("folder: model", "folder: 'URL'"),
        MINIMAL + "exam: {facts: 'URL', forms: 'URL'}",
        MINIMAL + "store: 'URL'",
        MINIMAL + "platform: ['URL']",
        MINIMAL + "study: {generator: {address: 'URL', model: a}}",
    ],
)
@pytest.mark.parametrize(
    "url",
    [
        "https://user:SECRET@example.com/a?token=SECRET",
        "gs://user:SECRET@bucket/a",
        "https://us@er:SEC/RET@example.com/#SECRET",
    ],
)
def test_no_message_repeats_a_password_in_a_url(tmp_path: Path, text: str, url: str) -> None:
    with pytest.raises(UserError) as error:
        load_settings(write(tmp_path, text.replace("URL", url)))
    assert not re.search("SEC|RET", str(error.value)), str(error.value)


def test_a_value_given_for_one_run_is_not_told_where_it_may_be_a_secret(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL)
    with pytest.raises(UserError, match=r"with another endpoint\.token_variable has") as error:
        changed_settings(file, {"endpoint.token_variable": "sk-SECRET"})
    assert "SECRET" not in str(error.value)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    wrong = "stroe: x\nplatfrom: y\ncheckpoint: {budget: {steps: 0}}"
    with pytest.raises(UserError) as error:
        load_settings(write(tmp_path, MINIMAL + wrong))
    assert all(key in str(error.value) for key in ("stroe", "platfrom", "budget.steps"))


def test_a_section_that_is_there_twice_is_named(tmp_path: Path) -> None:
    text = MINIMAL + "clean_corpus: {minimum_characters: 20}\nclean_corpus: {unicode_form: NFKC}"
    with pytest.raises(UserError, match=r"yaml.*`clean_corpus` is on line 7 and again on line 8"):
        load_settings(write(tmp_path, text))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            MINIMAL.replace("manuals", "H\u00e4user").encode("latin-1"),
            "not UTF-8 .* Save it as UTF-8",
        ),
        (f"{MINIMAL}clean_corpus:\n\tminimum_characters: 20\n".encode(), "Indent with spaces"),
        (b"- a list", "must be a YAML mapping"),
        (b"a: [unclosed", "is not valid YAML"),
    ],
)
def test_what_is_wrong_with_the_file_itself_is_told_with_the_way_out(
    tmp_path: Path, content: bytes, told: str
) -> None:
    (tmp_path / "pipeline.yaml").write_bytes(content)
    with pytest.raises(UserError, match=rf"(?s)pipeline\.yaml .*{told}"):
        load_settings(tmp_path / "pipeline.yaml")


def test_the_only_pipeline_file_need_not_be_named_beside_files_of_other_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLM_ASSETS_CONFIG", raising=False)
    Path("config").mkdir()
    Path("config/google_cloud.yaml").touch()
    unfinished = write(tmp_path, "name: manuals\n")
    assert config_path() == Path(unfinished.name), "a run says what it lacks"
    ours = write(tmp_path, MINIMAL)
    Path("forms.yaml").write_text("town: {told: ['{subject} is made in {value}.']}\n")
    Path("dump.yaml").write_text(f"raw_corpus: {'x' * 2**20}", "utf-8")
    assert config_path() == Path(ours.name), "a dump of data is no settings"
    Path("dump.yaml").unlink()
    with monkeypatch.context() as locked:
        # The superuser, as whom tests may run, reads every file.
        locked.setattr(os, "access", lambda path, mode: path != Path(ours.name))
        Path("forms.yaml").unlink()
        assert config_path() == Path(ours.name), "a run says that it may not be read"
    Path("config/other.yaml").write_text(MINIMAL)
    with pytest.raises(UserError, match=r"Here: config/other\.yaml, pipeline\.yaml$"):
        load_settings(config_path())
