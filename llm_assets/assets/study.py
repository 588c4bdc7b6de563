"""Text made from documents, in many forms, which is trained on beside them."""

from typing import Any

import dagster as dg

from artifacts.progress import counted
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft
from llm_assets.assets.corpus import GROUP, clean_view, plan_cleaning
from llm_assets.assets.stage import BuildPlan, stage, table
from llm_assets.pipeline import Comparison, PipelineResource
from llm_assets.registry.card import CHOSEN
from llm_assets.runners.spark import SparkRunner
from llm_assets.study.rows import CODE_VERSION, DERIVED_FOLDER, write_rows
from llm_assets.study.settings import SOURCE, StudySettings
from recipes.evaluation.exam import read_questions
from spark_jobs.clean import job as clean
from spark_jobs.clean.prepare import libraries_of as clean_libraries
from spark_jobs.clean.write import CLEAN_SCHEMA
from spark_jobs.settings import CleanCorpusSettings, SplitSettings, TemplateSettings


def study_view(artifact: Artifact) -> dict[str, Any]:
    view, derived = clean_view(artifact), artifact.stats["derived"]
    return view | {
        "summary": f"{counted(artifact.stats['documents'], 'text')} made from "
        f"{counted(derived['documents_studied'], 'document')}",
        "made_by": table(["method", "texts"], derived["rows"].items()),
        "left_out": table(["reason", "texts"], derived["left_out"].items()),
        "generator_tokens": derived["tokens"],
        "generator_dollars": derived["dollars"],
        "requests_beyond_the_budget": derived["not_asked"],
    }


@stage(
    code_version=f"{CODE_VERSION}.{clean.CODE_VERSION}",
    group=GROUP,
    kinds={"python", "spark"},
    pool="spark",
    view=study_view,
    columns=CLEAN_SCHEMA,
)
def study(
    context: dg.AssetExecutionContext,
    pipeline: PipelineResource,
    spark: SparkRunner,
    identity: Identity,
    settings: StudySettings,
    clean_corpus: Artifact,
    exam: Artifact | None,
) -> BuildPlan:
    """Text derived from the training documents: their facts in many forms, and what a generator
    writes about them.

    It is cleaned like the corpus, and all of it is training text. Each row names its document, so
    that it can be traced to it and is forgotten with it.
    """
    cleaning = _cleaning(pipeline.settings.clean_corpus)
    inputs, specify = plan_cleaning(pipeline, cleaning)
    identity = identity.extend(
        settings={"cleaning": cleaning.content()},
        inputs=inputs,
        libraries=clean_libraries(cleaning),
    )

    def spec(output: str) -> clean.CleanSpec:
        # These rows stay in the artifact, since `compare` cleans a sample of them again.
        derived = f"{output}/{DERIVED_FOLDER}"
        return specify(raw_corpus=derived, output=output, libraries=identity.libraries)

    def build(draft: Draft) -> None:
        questions = read_questions(exam.path) if exam else []
        derived = write_rows(
            settings, clean_corpus.url, questions, draft.url, pipeline.store.cache, context.log.info
        )
        draft.stats |= spark.run(context, clean, spec(draft.url)) | {"derived": derived}
        # The facts are data, which arrive like text; in which forms they are told is a choice.
        draft.stats[CHOSEN] = identity.settings | {"facts": settings.facts}

    def compare(artifact: Artifact) -> Comparison:
        return clean.compare_documents(spec(artifact.url), artifact.url)

    return BuildPlan(identity, build, compare)


def _cleaning(settings: CleanCorpusSettings) -> CleanCorpusSettings:
    """How derived text is cleaned: like the corpus, except for filters that would drop it wrongly.

    Facts in one form share a template and are short; and all derived text is training text.
    """
    return settings.model_copy(
        update={
            "minimum_characters": 1,
            "templates": TemplateSettings(keep=None),
            "split": SplitSettings(sources={SOURCE: "train"}),
        }
    )
