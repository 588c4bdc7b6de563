"""The one screen at the end of a run."""

import json
import re
from collections.abc import Mapping
from shlex import quote
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from artifacts.errors import shown
from artifacts.examples import Form
from artifacts.progress import counted, format_duration, percent
from artifacts.shards.format import SPLITS
from artifacts.store.store import Artifact
from llm_assets.assets.evaluation import UNMEASURED
from llm_assets.assets.figures import loss_line
from llm_assets.assets.verdict import read_verdict
from llm_assets.cli.session import Session
from llm_assets.config import PipelineSettings, command
from llm_assets.exam.questions import exam_shares
from llm_assets.gate.verdict import Outcome, Verdict
from llm_assets.preflight.text import tell_classes
from llm_assets.registry.card import number
from llm_assets.tracing.dropped import find_changes, tell_changes, tell_held_back
from llm_assets.tracing.explain import Samples, form_shown, read_samples
from recipes.evaluation.exam import read_questions
from recipes.evaluation.settings import ANSWER_BITS_PER_BYTE, Metric, Rounds
from recipes.sections import BUDGETS
from recipes.settings import TrainingSettings
from recipes.spec import UNIT_NOTES, read_metrics
from spark_jobs.clean.decide.decider import CONTRADICTING, DROPPED_SCHEMA, read_dropped

SHOWN = (
    *("raw_corpus", "clean_corpus", "tokenized_shards"),
    *("checkpoint", "eval_metrics", "model_version"),
)


def print_summary(
    console: Console,
    session: Session,
    endpoint: Mapping[str, Any],
    stages: Mapping[str, float],
    seconds: float,
) -> None:
    """Print what the run made: the current artifacts.

    Args:
        endpoint: the metadata of the endpoint's materialization.
        stages: asset to the seconds that it took, of those that were made.
    """
    settings, record = session.settings, session.record
    current = {name: record.current(name, needed_by="endpoint") for name in SHOWN}
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    serves = f"{endpoint.get('url')} serves version {endpoint.get('version')}"
    before = record.find_before("clean_corpus") if "clean_corpus" in stages else None
    for label, text in [
        *corpus_lines(
            current["raw_corpus"], current["clean_corpus"], current["tokenized_shards"], before
        ),
        *training_lines(current["checkpoint"], current["tokenized_shards"]),
        *evaluation_lines(current["eval_metrics"]),
        *exam_lines(current["eval_metrics"]),
        *_verdict_lines(
            current["model_version"],
            current["tokenized_shards"],
            settings,
            endpoint["newest_candidate"],
        ),
        ("endpoint", escape(endpoint["summary"]) if "url" not in endpoint else serves),
    ]:
        table.add_row(label, text)
    console.print()
    console.print(table, highlight=False)
    samples = read_samples(current["eval_metrics"])
    form = form_shown(current["eval_metrics"])[0]
    if "url" in endpoint:
        print_request(console, endpoint, samples, settings.platform == "local", form)
    print_samples(console, samples, current["eval_metrics"], record.find_current("exam"), form)
    times = ", ".join(f"{stage} {duration:.0f} s" for stage, duration in stages.items())
    console.print(f"\n{times or 'Everything is up to date.'}", style="dim", highlight=False)
    console.print(
        f"Done in {format_duration(seconds)}.\nAsk, trace, decide: [bold]llm-assets board[/]. "
        "The graph: [bold]llm-assets up[/]. Stop the endpoint: [bold]llm-assets stop[/].",
        highlight=False,
    )


def corpus_lines(
    raw: Artifact, clean: Artifact, shards: Artifact, before: Artifact | None = None
) -> list[tuple[str, str]]:
    """What became of the text: a label and a sentence each, with every document accounted for.

    Args:
        before: the clean corpus that this one has replaced, if it was just made.
    """
    dropped, stats = clean.stats["dropped"], shards.stats
    # What follows the colon is a label, and stays as it is.
    kinds_of = ((reason.partition(":"), count) for reason, count in dropped.items())
    reasons = [
        escape(shown(f"{kind.replace('_', ' ')}{mark}{label} {count:,}"))
        for (kind, mark, label), count in kinds_of
    ]
    tokens = sum(stats["tokens"][split] for split in SPLITS)
    train, validation, held_out = (stats["documents"][split] for split in SPLITS)
    overlapping = sum(stats["removed_as_overlapping_held_out"].values())
    lost = sum([*dropped.values(), *stats["left_out"].values(), overlapping])
    again = sum(stats["documents"].values()) + lost - raw.stats["documents"]
    # What `study` makes of documents is in shards, too, and in no raw corpus.
    is_mixed = again > 0 and "study" not in shards.manifest.inputs
    repeats = f" ({again:,} of them again, by `tokenized_shards.mixing`)" if is_mixed else ""
    read = raw.stats
    kinds = (("not read", read["unread"]), ("decoded", read.get("decoded", {})))
    passed_over = [
        (label, escape(shown(f"{count:,} {kind.replace('_', ' ')}")))
        for label, counts in (*kinds, ("set aside", read["dropped"]))
        for kind, count in counts.items()
    ]
    if passed_over:
        passed_over.append(("", f"names and reasons: {escape(command())} check --all"))
    if repeated := read["repeated_ids"]:
        passed_over.append(("repeated ids", f"{repeated:,}, each made unique by a number"))
    lines = [
        ("documents read", f"{read['documents']:,} ({read['bytes'] / 1e6:.1f} MB)"),
        *passed_over,
        ("removed", f"{sum(dropped.values()):,}" + (": " + ", ".join(reasons) if reasons else "")),
        (
            "tokens",
            f"{tokens:,} in {counted(train, 'document')} to train on{repeats}, {validation:,} to "
            f"validate, {held_out:,} held out",
        ),
    ]
    changes = tell_changes(find_changes(clean, before, ())) if before else ""
    told = (("changed", changes), ("held back", tell_held_back(clean.stats)))
    lines[-1:-1] = [(label, escape(shown(text))) for label, text in told if text]
    if documents := stats["documents"].get("replay", 0):
        text = f"{counted(stats['tokens']['replay'], 'token')} in "
        text += f"{counted(documents, 'document')} of other text; "
        text += "a share of the training rows comes from it, to limit forgetting"
        lines.append(("to replay", text))
    if labels := stats.get("labels"):
        classes = tell_classes(dict(zip(labels, stats["label_counts"], strict=True)))
        lines.append(("classes", escape(shown(f"{classes} texts to train on"))))
    if contradicting := [reason for reason in dropped if reason.startswith(CONTRADICTING)]:
        listed = read_dropped(clean.url, DROPPED_SCHEMA, "reason", pa.array(contradicting))
        named = ", ".join(sorted(listed["id"].to_pylist())[:MOST])
        kept = f"of a text with several labels, the one of most documents is kept; others: {named}"
        lines.append(("", escape(shown(f"{kept}; the reason for each: llm-assets document ID"))))
    lines += [("", escape(shown(warning))) for warning in stats.get("warnings", [])]
    counts = [f"{n:,} {reason.replace('_', ' ')}" for reason, n in stats["left_out"].items()]
    if overlapping:
        counts.append(f"{overlapping:,} that share text with what is held out")
    return [*lines, ("left out", ", ".join(counts))] if counts else lines


def training_lines(checkpoint: Artifact, shards: Artifact) -> list[tuple[str, str]]:
    """The effect on text that was not trained on, the loss, and how much of the training text was
    read, or how often.

    Replayed text does not count as training text.
    """
    stats = checkpoint.stats
    before, after = (number(stats["validation"][end]) for end in ("start", "end"))
    # In rows, without those replayed: of their tokens, many recipes train only on a few.
    own_rows = stats["samples_seen"] - stats["samples_replayed"]
    passes = own_rows / max(1, shards.stats["rows"]["train"])
    coverage = f"{passes:.1f} passes over the training text (`checkpoint.budget`)"
    # A run that continues may read new rows many times, and never some that were left before.
    if passes < 1 or stats["coverage"] < 1:
        # In tokens, with those that the versions before it have read, as the asset shows it.
        coverage = f"{percent(stats['coverage'])} of the training text read so far, as many rows "
        coverage += f"as {passes:.2g} passes have in this run (`checkpoint.budget`)"
    unit = stats["validation_unit"]
    return [
        (
            "training",
            f"{counted(stats['steps'], 'step')}, {stats['tokens_per_second']:.0f} tokens/s; "
            f"validation text {before} -> {after} {unit}{UNIT_NOTES.get(unit, '')}",
        ),
        ("training loss", loss_line(read_metrics(checkpoint.url))),
        ("coverage", coverage),
    ]


def evaluation_lines(evaluation: Artifact) -> list[tuple[str, str]]:
    metrics, metric = evaluation.stats["metrics"], Metric.model_validate(evaluation.stats["metric"])
    lines = []
    for label, task in (("held-out text", "held_out"), ("general text", "general")):
        task_metric = metric.of(task)
        name = f"{task}_{task_metric.name}"
        if name not in metrics:
            continue
        base, candidate = (
            metrics[name].get(role, UNMEASURED)["value"] for role in ("base", "candidate")
        )
        # What is not finite, or was not measured, is None; a base of 0, or a score, has none.
        is_ratio = base and candidate and not task_metric.higher_is_better
        change = f" ({(candidate - base) / base:+.1%})" if is_ratio else ""
        # Of the first candidate, the incumbent is the base model.
        incumbent = metrics[name].get("incumbent", UNMEASURED)["value"]
        basis = "" if incumbent in (None, base) else f"; the incumbent {number(incumbent)}"
        if task == "held_out":
            # The first rounds may have been enough.
            rounds = Rounds.model_validate(evaluation.stats["rounds"])
            basis += f", on {counted(evaluation.stats['documents']['held_out'], 'document')}"
            if rounds.measured < rounds.planned:
                basis += f": round {rounds.measured} of {rounds.planned} decided"
            basis += _over_budget(evaluation)
        lines.append(
            (label, f"{number(base)} -> {number(candidate)} {task_metric.unit}{change}{basis}")
        )
        if task_metric == ANSWER_BITS_PER_BYTE and not evaluation.stats.get("exam"):
            told = "This says how likely the held-out answers are to the models. Most of an answer "
            told += "is tone and wording, so a model that gains may still write wrong numbers and "
            lines.append(("", f"{told}names. What judges facts: llm-assets docs recipes"))
    lines += _class_lines(evaluation)
    of_text = ("held_out_", "general_", "exam_")
    others = [
        f"{name} {number(of['base']['value'])} -> {number(of['candidate']['value'])}"
        for name, of in metrics.items()
        if not name.startswith(of_text) and {"base", "candidate"} <= of.keys()
    ]
    return [*lines, ("other scores", ", ".join(others))] if others else lines


def _over_budget(evaluation: Artifact) -> str:
    """Why more held-out text was measured than the settings say; empty if it was not."""
    settings = evaluation.manifest.settings
    if (limit := settings.get("held_out_tokens")) is None:
        return ""
    tokens, documents = (evaluation.stats[of]["held_out"] for of in ("tokens", "documents"))
    # The document that reaches the limit is measured whole.
    if tokens - (settings.get("document_tokens") or tokens / documents) <= limit:
        return ""
    # Where the exam decides, the gate has no question to held-out text.
    part, needed = "a quarter of ", ""
    if settings.get("question"):
        part, needed = "", ", `model_version.gate.minimum_documents`"
    return (
        f". They hold {tokens:,} tokens, more than {part}`eval_metrics.held_out_tokens` "
        f"({limit:,}): at least {settings['minimum_documents']} independent ones are measured "
        f"(`eval_metrics.minimum_documents`{needed})"
    )


def _class_lines(evaluation: Artifact) -> list[tuple[str, str]]:
    """Of a classifier, what always telling one class would score, and what it takes for what."""
    found = evaluation.stats.get("details", {}).get("candidate", {"labels": [], "confusion": []})
    names = [escape(shown(label)) for label in found["labels"]]
    totals = list(map(sum, found["confusion"]))
    if not totals:
        return []
    numbered = [(true, told) for true in range(len(names)) for told in range(len(names))]
    cells = sorted(((found["confusion"][a][b], names[a], names[b]) for a, b in numbered if a != b))
    mistakes = [f"{true} as {told}: {count:,}" for count, true, told in reversed(cells) if count]
    f1 = evaluation.stats["metrics"]["held_out_macro_f1"]
    before, after = (number(f1.get(role, UNMEASURED)["value"]) for role in ("base", "candidate"))
    most = f"always {names[totals.index(max(totals))]}, the commonest: "
    most += number(max(totals) / sum(totals))
    unseen = ", ".join(name for name, total in zip(names, totals, strict=True) if not total)
    told = f"no held-out text (`clean_corpus.split.held_out`) has the class: {unseen}"
    return [
        ("", f"{most}; macro F1, where every class counts the same: {before} -> {after}"),
        ("mistakes", ", ".join(mistakes[:MOST]) or "none"),
        *([("not judged", told)] if unseen else []),
    ]


def exam_lines(evaluation: Artifact) -> list[tuple[str, str]]:
    """The models' shares of right answers, and what training buys; empty without an exam."""
    exam = evaluation.stats.get("exam")
    if not exam:
        return []
    shares = [
        f"{condition} {base:.0%} -> {candidate:.0%}"
        for condition, base, candidate in exam_shares(evaluation.stats)
        if base is not None and candidate is not None
    ]
    models, known = evaluation.stats["models"], exam_shares(evaluation.stats, "incumbent")[0][1]
    if shares and known is not None and models["incumbent"] != models["base"]:
        # Of a run that continues, the base model does not show what this run taught.
        shares[0] += f" (the incumbent {known:.0%})"
    return [
        (
            "exam",
            f"{counted(exam['facts'], 'fact')}, correct answers, base -> new model: "
            f"{', '.join(shares)}",
        ),
        ("training buys", exam["sentence"]),
    ]


def _verdict_lines(
    version: Artifact, shards: Artifact, settings: PipelineSettings, outcome: str
) -> list[tuple[str, str]]:
    promoted = version.stats["promoted"]
    color = "green" if outcome == "promoted" else "yellow"
    label = "rejected, the incumbent stays" if outcome == "rejected" else outcome
    reasons = escape(" ".join(version.stats["reasons"]))
    lines = [("verdict", f"[{color}]{escape(label)}[/]. {reasons}")]
    # With fewer validation documents, an experiment reaches no verdict.
    least_documents = settings.model_version.gate.minimum_documents
    can_compare = shards.stats["documents"]["validation"] >= least_documents
    trials = trials_after(read_verdict(version), settings.checkpoint)
    if not promoted and can_compare and trials:
        lines.append(("to try", f"three other training runs, to compare: {escape(trials)}"))
    return lines


MOST = 12
"""Classes, the rarest ones, and kinds of mistakes that are listed."""
TOO_MUCH = {Outcome.CHANCE, Outcome.NOT_FINITE, Outcome.GENERAL_REGRESSION}
"""What too large steps cause: a model that diverged, or that lost what it knew."""
TOO_LITTLE = {Outcome.NOT_BETTER, Outcome.TIE}


def trials_after(verdict: Verdict, training: TrainingSettings) -> str | None:
    """The command that tries what most likely helps a training that was rejected.

    The learning rate comes first, since of all settings it depends most on the text and the model.
    If too little was learned, each rate also gets twice the training.

    Returns:
        None where other settings would not help, as with too few documents.
    """
    outcomes = {reason.outcome for reason in verdict.reasons}
    if outcomes & TOO_MUCH:
        factors, budget_option = (1 / 3, 1 / 10, 1 / 30), ""
    elif outcomes & TOO_LITTLE:
        factors, budget_option = (1, 3, 1 / 3), ""
        for name in BUDGETS:
            if amount := getattr(training.budget, name):
                budget_option = f" --set checkpoint.budget.{name}={2 * amount:g}"
    else:
        return None
    rates = ",".join(
        # The settings take no rate above 1.
        f"{min(1, training.optimizer.learning_rate * factor):.2g}"
        for factor in factors
    )
    return f"llm-assets experiment --set checkpoint.optimizer.learning_rate={rates}{budget_option}"


TITLES: Mapping[Form, tuple[str, str]] = {
    "pretraining": ("a text, continued in the models' own words", "text"),
    "conversations": ("a chat, answered in the models' own words", "question"),
    "pairs": ("a held-out input, and what the models write", "input"),
    "labeled": ("a held-out text, and the class that the models tell", "text"),
}
SHOWN_CHARACTERS, ASKED_CHARACTERS = 90, 1_000


def print_request(
    console: Console, endpoint: Mapping[str, Any], samples: Samples, is_local: bool, form: Form
) -> None:
    """A line to paste into a shell, unbroken at any width, and how to trace the answer.

    For a local endpoint, the headers of the answer are shown: they have the request's id. What is
    answered with a class has no text to trace.
    """
    sample = next(iter(samples.get("candidate", [])), {"prompt": "This function returns"})
    asked, url = " ".join(sample["prompt"].split())[:ASKED_CHARACTERS], endpoint["predict_url"]
    is_task = form in ("labeled", "pairs")
    body: dict[str, Any] = {
        "instances": [asked if is_task else {"prompt": asked, "max_tokens": 32}]
    }
    if is_local and form == "conversations" and "answer" in sample:
        url = f"{endpoint['url']}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": asked}]}
    # Of a token, the name of its variable, which the shell fills in.
    headers = [endpoint.get("authorization"), "'Content-Type: application/json'"]
    options = " ".join(f"-H {header}" for header in headers if header)
    shown_with = "-si" if is_local else "-s"
    content = quote(json.dumps(body, ensure_ascii=False))
    line = f"curl {shown_with} {url} {options} -d {content}"
    console.print()
    console.print(escape(line), soft_wrap=True, highlight=False)
    if is_local and form != "labeled":
        hint = "The training text behind the answer, by its x-request-id"
        console.print(f"{hint}: [bold]llm-assets trace --request ID[/]", highlight=False)


def print_samples(
    console: Console, samples: Samples, evaluation: Artifact, exam: Artifact | None, form: Form
) -> None:
    """What both models say in their own words: the first sentence of each answer to the exam or,
    without an exam, their continuations of one text or chat, or what they make of one example."""
    if not samples.get("base") or not samples.get("candidate"):
        return
    pairs = zip(samples["base"], samples["candidate"], strict=True)
    rows: list[tuple[str, ...]] = []
    if exam and evaluation.stats.get("exam"):
        title, heading = "exam questions, answered in the models' own words", "question"
        right = {question["id"]: question["value"] for question in read_questions(exam.path)}
        sentence_end = re.compile(r"(?<=[.!?])(?=\s|[A-Z])|\n")
        for one, other in pairs:
            said = (sentence_end.split(by["completion"].strip())[0] for by in (one, other))
            rows.append((one["prompt"], *said, right.get(one["document"], "")))
    else:
        title, heading = TITLES[form]
        one, other = next(pairs)
        line = " ".join(one["prompt"].split())
        # The end of the prompt is what is continued; what is answered is known by its beginning.
        ends = f"{line[:SHOWN_CHARACTERS]} …", f"… {line[-SHOWN_CHARACTERS:]}"
        start = line if len(line) <= SHOWN_CHARACTERS else ends["answer" not in one]
        completions = (model["completion"].strip() for model in (one, other))
        rows = [(start, *completions, *filter(None, [one.get("answer")]))]
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    columns = ((heading, 3, ""), ("base model", 2, "dim"), ("new model", 2, ""), ("correct", 1, ""))
    for name, ratio, style in columns[: len(rows[0])]:
        table.add_column(name, ratio=ratio, overflow="fold", style=style)
    for cells in rows:
        table.add_row(*(escape(shown(cell)) for cell in cells))
    console.print()
    console.print(table, highlight=False)
