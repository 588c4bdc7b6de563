"""Whether enough text is held out to judge a model, and which gain it can show."""

import math
from bisect import bisect_left
from contextlib import suppress

from artifacts.errors import DamagedArtifact, UserError
from artifacts.progress import counted
from artifacts.shards.format import SPLITS
from artifacts.storage.files import is_local
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from llm_assets.config import PipelineSettings
from llm_assets.gate.verdict import GateSettings
from llm_assets.preflight.text import TextEstimate
from recipes.evaluation.settings import EvaluationSettings, Rounds
from recipes.evaluation.statistics import POWER, level, reach

ENOUGH_SHORT = 1_000
"""If this many documents are all too short, the others, which were not looked at, are too."""
MOST_HELD_OUT = 0.6
"""Largest share of little text that is held out, so that a model still learns from the rest."""
AIM = 2
"""Documents to hold out, as a multiple of what the gate needs."""
KEPT = 0.8
"""Share of the documents of a look that are taken to count: near-copies count as one, and cleaning
drops others."""
LIKELY_EMPTY = 0.05
"""Chance of an empty split from which on it is mentioned before a run."""
DOCUMENT_SPREAD = 0.066
"""Standard deviation of a document's gain, in bits per byte; docs/promotion.md has how it was
measured."""


def held_out_share(documents: float, gate: GateSettings) -> float | None:
    """The share to hold out, so that the gate can decide; None where no share is enough."""
    aim = AIM * gate.minimum_documents / max(1.0, documents)
    share = math.ceil(100 * max(0.05, min(MOST_HELD_OUT, aim))) / 100
    return share if _surely(documents, share) >= gate.minimum_documents else None


def _surely(documents: float, share: float) -> float:
    """How many of these documents are held out and count, in all but one of forty draws."""
    # The split is random per document: minus two standard deviations.
    return KEPT * documents * share - 2 * math.sqrt(KEPT * documents * share * (1 - share))


def most_measured(measured: EvaluationSettings) -> float:
    """About how many held-out documents are measured at most."""
    # Where documents are not cut, they are taken to have as many tokens as the default leaves them.
    of_one = measured.document_tokens or 512
    return max((measured.held_out_tokens or math.inf) / of_one, measured.minimum_documents)


def visible_gain(held_out: float, gate: GateSettings, measured: EvaluationSettings) -> float:
    """The gain in bits per byte that the first judgement finds with a probability of 80%."""
    from scipy.special import ndtri

    clusters = max(2, int(min(held_out, most_measured(measured))))
    error = DOCUMENT_SPREAD / math.sqrt(clusters)
    # The level of the first look, judged in a single round.
    alpha = level(gate.lifetime_error, 1, Rounds(measured=1, planned=1, share=1.0))
    margin = max(float(reach(error, 0.0, clusters, alpha)), gate.smallest_effect)
    return margin + float(ndtri(POWER)) * error


def all_too_short(settings: PipelineSettings, text: TextEstimate) -> str | None:
    """The fault that cleaning would keep no document; None if it keeps some, or might."""
    is_sure = not text.unseen and (text.share == 1 or text.short >= ENOUGH_SHORT)
    if text.bytes or not text.short or not is_sure:
        return None
    return (
        f"All {text.short:,.0f} documents are shorter than `clean_corpus.minimum_characters` "
        f"({settings.clean_corpus.minimum_characters}), so there is nothing to train on. Lower it, "
        "or add longer documents."
    )


def describe_held_out(settings: PipelineSettings, text: TextEstimate) -> tuple[str, str | None]:
    """What is held out and which gain it shows; or why it is too little to judge a model."""
    if text.unseen:
        return "", None
    if too_short := all_too_short(settings, text):
        return "", too_short
    gate, split = settings.model_version.gate, settings.clean_corpus.split
    documents, expected = text.documents, text.held_out + text.documents * split.held_out
    line = f"about {counted(expected, 'document', ',.0f')} will be held out"
    if gate.metric == "exam":
        return f"{line}; the exam decides", None
    if expected >= gate.minimum_documents:
        line += _describe_gain(settings, expected)
        if KEPT * text.held_out + _surely(documents, split.held_out) < gate.minimum_documents:
            line += (
                f"; near-copies count as one and cleaning drops some, so that fewer than the "
                f"{gate.minimum_documents} that the gate needs may be left, and a run end after "
                "cleaning: to be sure, "
            )
            share = held_out_share(documents, gate) or 0
            wider = f"set `clean_corpus.split.held_out: {share:.2f}`, or "
            line += f"{wider if share > split.held_out else ''}add text"
        return line, None
    line = f"About {expected:.0f} of {documents + text.held_out:,.0f} documents would be held out"
    line += f" ({text.short:,.0f} others are too short)" if text.short else ""
    # Even if none was seen there may be some documents, and others can be held out.
    return "", _obstacle(line, max(1.0, documents), settings)


def _describe_gain(settings: PipelineSettings, held_out: float) -> str:
    """The gain that so many held-out documents can show, if the spread of their scores is known."""
    recipe = settings.checkpoint
    if settings.form != "pretraining" or recipe.family != "causal" or not recipe.is_judged_in_bits:
        return f"; the metric of the recipe {recipe.recipe} decides"
    most, more = most_measured(settings.measured), 4 * held_out
    gain, of_more = (
        visible_gain(count, settings.model_version.gate, settings.measured)
        for count in (held_out, more)
    )
    line = f", enough to detect a gain of {gain:.3f} bits per byte with 80% power"
    limit = "`eval_metrics.held_out_tokens`"
    if held_out >= most:
        return f"{line}; about {most:,.0f} of them are measured, as {limit} says"
    others = (
        "four times as many" if more <= most else f"{most:,.0f}, about the most that {limit} allows"
    )
    return f"{line} ({of_more:.3f} with {others})"


def held_out_obstacle(clusters: int, documents: float, settings: PipelineSettings) -> str | None:
    """Why the cleaned text is too little to judge a model; None if it is enough.

    Args:
        clusters: independent documents that are held out.
        documents: all independent documents, some of which can still be held out; 0 once a model
            has read them, because splits do not change afterwards.
    """
    gate = settings.model_version.gate
    # An exam asks about facts, of which it needs enough, and held-out text decides nothing.
    if gate.metric == "exam" or clusters >= gate.minimum_documents:
        return None
    line = f"Only {clusters:,} independent documents are held out"
    return _obstacle(f"{line}, near-copies and versions counted as one", documents, settings)


UNJUDGED = "To train anyway and decide yourself: `llm-assets run --unjudged`, then"


def _obstacle(line: str, documents: float, settings: PipelineSettings) -> str:
    """What is too little, and the ways out; `documents` as in `held_out_obstacle`."""
    gate = settings.model_version.gate
    share = held_out_share(documents, gate)
    line += (
        f", fewer than the {gate.minimum_documents} that the gate needs, so it could not promote a "
        "model. "
    )
    if not documents:
        line += "Add documents: some of the new ones are held out, too."
    elif share and share > settings.clean_corpus.split.held_out:
        line += f"Set `clean_corpus.split.held_out: {share:.2f}`, or add text."
    else:
        # Of four times as many, half are surely enough.
        counts = range(4 * gate.minimum_documents)
        needed = bisect_left(counts, True, key=lambda n: held_out_share(n, gate) is not None)
        line += (
            f"Add text: at least {needed} different documents of "
            f"{settings.clean_corpus.minimum_characters} characters or more "
            "(`clean_corpus.minimum_characters`) are needed; a document is a file, or a row of a "
            "table."
        )
    version = "1" if documents else "VERSION"
    return f"{line} {UNJUDGED} `llm-assets approve {version} --reason REASON`"


def find_whole(settings: PipelineSettings, asset: str) -> Artifact | None:
    """The asset's current artifact; None without one, if its manifest is damaged, or if the store
    is in a bucket, which is not accessed before a run."""
    if is_local(settings.store):
        with suppress(DamagedArtifact):  # Whoever needs it says so.
            return Pipeline(Store(settings.store), settings.name).find_current(asset)
    return None


def foresee_held_out(settings: PipelineSettings, text: TextEstimate, is_judged: bool) -> list[str]:
    """What is held out and the gain that shows; raises UserError where that is too little.

    If text was removed since it was divided, this may say too much: how many held-out documents
    remain is known after cleaning, and checked again before training.
    """
    if too_short := all_too_short(settings, text):
        raise UserError(too_short)
    split, divided = settings.clean_corpus.split, find_whole(settings, "clean_corpus")
    former, chosen = divided.manifest.settings["split"] if divided else {}, split.model_dump()
    changed = [name for name in chosen if former.get(name, chosen[name]) != chosen[name]]
    record = Pipeline(Store(settings.store), settings.name)
    is_trained = divided is not None and record.recorded("checkpoint") is not None
    is_certain = True
    if divided is None or (changed and not is_trained):
        line, obstacle = describe_held_out(settings, text)
    else:
        counts, raw, new = divided.stats["splits"], find_whole(settings, "raw_corpus"), 0
        if raw and not text.unseen:
            # About how many came since the text was last read.
            sources = raw.stats["sources"].items()
            read = (one["documents"] for name, one in sources if name not in split.replayed)
            new = max(0, round(text.in_sources) - sum(read))
        held_out = counts.get("held_out", 0)
        line = f"Documents held out: {held_out:,}."
        # Replayed text is in no other split, so none of it can be held out.
        documents = 0 if is_trained else sum(counts.values()) - counts.get("replay", 0) + new
        obstacle = held_out_obstacle(held_out + int(split.held_out * new), documents, settings)
        # Text that was not looked at may have grown, so an obstacle is not certain.
        is_certain = not text.unseen and text.share == 1
    # Text that a model was trained on may not be held out later, nor the reverse.
    if changed and is_trained:
        line += (
            " Existing splits do not change: what `clean_corpus.split` now has under "
            f"{' and '.join(f'`{name}`' for name in changed)} applies to new text only. To split "
            "all text again, stop the endpoint (`llm-assets stop`) and give the pipeline another "
            "`name`: versions and verdicts of this one stay."
        )
    if obstacle and is_certain and is_judged:
        raise UserError(obstacle)
    if obstacle and not is_judged:
        obstacle = obstacle.replace(UNJUDGED, "Once a model is trained, decide yourself:")
    thin = _empty_split(settings, text) if divided is None else None
    return list(filter(None, [line.strip(), obstacle, thin]))


def _empty_split(settings: PipelineSettings, text: TextEstimate) -> str | None:
    """A warning where a split may well get no document, as they are divided by chance: the run
    would then end after cleaning. None where that is unlikely; raises UserError where it is
    certain."""
    split, documents = settings.clean_corpus.split, text.documents
    shares = {name: getattr(split, name) for name in ("validation", "held_out")}
    lacking = " and ".join(one for one in SPLITS if one not in split.sources.values())
    if lacking and {one.name for one in settings.raw_corpus.sources} <= split.sources.keys():
        raise UserError(
            f"`clean_corpus.split.sources` assigns every source, and none to {lacking}: the run "
            "would end after cleaning. Leave out a source, so that its text is divided, or assign "
            "one to each."
        )
    chances = [
        f"{(1 - share) ** documents:.0%} that none is {name.replace('_', '-')} text"
        for name, share in shares.items()
        if name not in split.sources.values() and (1 - share) ** documents >= LIKELY_EMPTY
    ]
    if text.unseen or not documents or not chances:
        return None
    return (
        f"Of {counted(documents, 'document', ',.0f')}, the chance is {' and '.join(chances)}: then "
        "the run ends after cleaning. Add documents, raise the split's share in "
        "`clean_corpus.split`, or assign it a source (`clean_corpus.split.sources`)."
    )
