"""Held-out text measured again by engines, where what serves is not what the evaluation measured.

Quantized weights are other weights. So the gate is given how candidate and incumbent score with
them, both in the format of `endpoint.weights`: the one that the incumbent serves in, too, as soon
as the settings hold.
"""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.store.identity import hash_json
from llm_assets.endpoint.judged import held_out_scores, read_judged
from llm_assets.gate.judge import SERVED_TASK
from recipes.evaluation.settings import SCORES_NAME, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from recipes.spec import RESULT_NAME
from serving.comparison import JudgedDocument
from serving.engine.process import EngineProcess
from serving.engine.protocol import EngineLost, Refused
from serving.settings import EndpointSettings
from serving.state import Desired
from serving.traffic import bits_of

FINGERPRINT_KEY = "evaluation_fingerprint"


def measure_as_served(
    spec: EvaluationSpec, settings: EndpointSettings, conversions: Path, report: Report
) -> dict[str, Any]:
    """Add the task `held_out_served` to an evaluation: its held-out documents, scored by engines.

    Args:
        spec: of an evaluation that is written, of a candidate and an incumbent.
        settings: by which an engine is started.
        conversions: where converted models are cached, for the endpoint to find them.

    Returns:
        The result with the format as `served_weights` and another fingerprint; as it was where not
        every model was measured, or not in bits.

    Raises:
        UserError: no engine runs a model in this format, or one ended early.
    """
    folder = Path(spec.output)
    result: dict[str, Any] = json.loads((folder / RESULT_NAME).read_text())
    if result["faults"] or not result["metric"]["is_bits"]:
        return result
    scores = pq.read_table(folder / SCORES_NAME)
    rows = held_out_scores(scores)
    documents = read_judged(rows, Path(spec.shards), spec.shard_stats)
    found: dict[str, list[float]] = {}
    for role, source in (("candidate", spec.candidate), ("incumbent", spec.incumbent)):
        assert source is not None, "the registry always has one"
        if source.fingerprint not in found:
            report(f"{role}: measuring {len(documents)} documents in {settings.weights}")
            bits = _measure(source, role, documents, settings, conversions, folder)
            found[source.fingerprint] = asyncio.run(bits)
        place = rows.column_names.index(f"score_{role}")
        rows = rows.set_column(place, f"score_{role}", pa.array(found[source.fingerprint]))
    fingerprint = hash_json({"before": result[FINGERPRINT_KEY], "in": settings.weights})
    together = pa.concat_tables([scores, _renamed(rows)])
    together = together.replace_schema_metadata({FINGERPRINT_KEY: fingerprint})
    pq.write_table(together, folder / SCORES_NAME)
    result |= {"served_weights": settings.weights, FINGERPRINT_KEY: fingerprint}
    (folder / RESULT_NAME).write_text(json.dumps(result, indent=1))
    return result


def check_engine(model: Path, settings: EndpointSettings, conversions: Path) -> None:
    """Start an engine on a model and end it; raises UserError where none runs it by the settings.

    The model is one that a training begins with: of its family is what will have to be served.
    """
    begun = ModelSource(path=str(model), fingerprint="base")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(begun, "base model", [], settings, conversions, Path(folder)))


async def _measure(
    source: ModelSource,
    role: str,
    documents: Sequence[JudgedDocument],
    settings: EndpointSettings,
    conversions: Path,
    folder: Path,
) -> list[float]:
    """Bits of each document as an engine finds them; raises UserError."""
    desired = Desired(
        model_folder=Path(source.path),
        version=role,
        fingerprint=source.fingerprint,
        settings=settings,
        conversions=conversions,
    )
    engine = EngineProcess(desired, folder / f"engine-{role}.log", lambda: None)
    try:
        await engine.start()
        return [await bits_of(engine, document) for document in documents]
    except (EngineLost, Refused) as error:
        raise UserError(
            f"The {role} could not be measured as it would serve, in {settings.weights}: {error}."
        ) from error
    finally:
        await engine.stop()


def _renamed(rows: pa.Table) -> pa.Table:
    """Rows as those of the served task; the base, which does not serve, has no scores."""
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    columns |= {"task": [SERVED_TASK] * len(rows), "score_base": [None] * len(rows)}
    return pa.table(columns, schema=rows.schema)
