"""Where the champion answers."""

import asyncio
import json
import math
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from dagster import ConfigurableResource
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet, list_documents, read_tokens
from artifacts.store.identity import hash_json
from artifacts.store.store import Store
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import (
    conversions_folder,
    endpoint_folder,
    endpoint_status,
    model_to_serve,
)
from llm_assets.gate.judge import DOMAIN_TASK, SERVED_TASK
from llm_assets.registry.state import ModelVersion
from recipes.evaluation.settings import SCORES_NAME, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from recipes.spec import RESULT_NAME
from serving import endpoint as process
from serving.comparison import JudgedDocument, compared
from serving.engine.process import EngineProcess
from serving.engine.protocol import EngineLost, Refused
from serving.errors import RETRY_SECONDS
from serving.rollout import PROBE
from serving.settings import QUANTIZED, Weights
from serving.state import Desired, Status
from serving.traffic import bits_of

COMPARED_TOKENS = 2_000
"""Enough tokens of held-out documents to notice a wrong model, within seconds."""


def judged_documents(store: Store, version: ModelVersion) -> list[JudgedDocument]:
    """The first documents of a version's evaluation.

    Empty if it was not measured in bits of plain text, as a base model, or if its evaluation or
    shards are no longer in the store.
    """
    evaluation = store.find_named("eval_metrics", version.lineage.get("eval_metrics", ""))
    # The shards that were evaluated on, which may be newer than those trained on.
    fingerprint = evaluation.manifest.inputs["tokenized_shards"] if evaluation else ""
    shards = store.find_named("tokenized_shards", fingerprint)
    if evaluation is None or shards is None:
        return []
    stats = ShardStats.model_validate(shards.stats)
    if not evaluation.stats["metric"]["is_bits"] or stats.form != "pretraining":
        return []
    scores = held_out_scores(pq.read_table(evaluation.path / SCORES_NAME))
    scores = scores.filter(pc.is_valid(scores["score_candidate"]))
    # Without a document's own tokens, so that the first is compared however long it is.
    preceding = pc.subtract(pc.cumulative_sum(scores["tokens"]), scores["tokens"])
    return read_judged(scores.filter(pc.less(preceding, COMPARED_TOKENS)), shards.path, stats)


def held_out_scores(scores: pa.Table) -> pa.Table:
    """Of an evaluation's scores, those of the documents that decide."""
    return scores.filter(pc.equal(scores["task"], DOMAIN_TASK))


def read_judged(scores: pa.Table, folder: Path, stats: ShardStats) -> list[JudgedDocument]:
    """Measured documents with their tokens, in the order of their scores, without those erased
    since.

    Args:
        scores: rows of an evaluation's held-out documents.
        folder, stats: of the shards that they were read from.
    """
    held_out = ShardSet(folder, stats, "held_out")
    documents = list_documents(held_out)
    documents = documents.filter(pc.is_in(documents["id"], scores["document"]))
    is_talk = stats.form == "conversations"
    marks = read_tokens(held_out, documents, "targets") if is_talk else [None] * len(documents)
    contents = zip(read_tokens(held_out, documents), marks, strict=True)
    by_id = dict(zip(documents["id"].to_pylist(), contents, strict=True))
    return [
        _judged(row, by_id[row["document"]], stats.sequence_length)
        for row in scores.to_pylist()
        if row["document"] in by_id
    ]


def _judged(
    row: dict[str, Any], content: tuple[np.ndarray, np.ndarray | None], length: int
) -> JudgedDocument:
    """A document as the evaluation reads it: every token but the first is predicted once."""
    tokens, marks = content
    # Plain text was cut to what was measured; a conversation was read whole, since answers count.
    text = tokens[: row["tokens"]] if marks is None else tokens
    starts = range(0, len(text) - 1, length)
    masks = [] if marks is None else [marks[a + 1 : a + length + 1] > 0 for a in starts]
    return JudgedDocument(
        id=row["document"],
        bytes=row["size"],
        bits=row["score_candidate"],
        windows=[text[start : start + length + 1].tolist() for start in starts],
        counted=[mask.tolist() for mask in masks],
    )


SECONDS, LEAST_SECONDS = 60.0, 1.0
"""Timeout for one answer, and its minimum once the time for all answers is used up."""
BUSY_SECONDS = 60.0
"""How long an endpoint with too many requests is asked again."""
TIMED_ANSWERS, TIMED_TOKENS = 3, 8
COUNTED = "serving_requests_total"
FAILED = 500
"""From this status on, a failure is the endpoint's own fault."""


class Requests(BaseModel):
    """How many requests the endpoint has answered since it was started."""

    model_config = ConfigDict(extra="forbid")

    all: int
    failed: int

    @classmethod
    def counted(cls, metrics: str) -> "Requests":
        """What metrics in Prometheus' text format count."""
        counts = [
            (int(sample.labels["status"]), int(sample.value))
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if sample.name == COUNTED
        ]
        return cls(
            all=sum(count for _, count in counts),
            failed=sum(count for status, count in counts if status >= FAILED),
        )

    def since(self, before: "Requests | None") -> "Requests":
        """Requests that came after; all of them if the endpoint was restarted in between."""
        # Counters of a process begin at 0, so a smaller number means that it was started again.
        if before is None or before.all > self.all or before.failed > self.failed:
            return self
        return self.minus(before)

    def minus(self, others: "Requests") -> "Requests":
        """These without others, which are among them."""
        return Requests(all=self.all - others.all, failed=self.failed - others.failed)

    def plus(self, others: "Requests") -> "Requests":
        """These and others."""
        return Requests(all=self.all + others.all, failed=self.failed + others.failed)


class LiveEndpoint:
    """An endpoint that runs on this machine."""

    def __init__(
        self, status: Status, seconds: float = SECONDS, seconds_in_all: float = math.inf
    ) -> None:
        """Raises UserError where it asks for a token that is not set here.

        Args:
            seconds: how long it may take for one answer.
            seconds_in_all: how long it may take for all answers together, from this call on.
        """
        self._http = httpx.Client(**status.client_options(), timeout=seconds)
        self._status = status
        self._seconds, self._end = seconds, time.monotonic() + seconds_in_all

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def requests(self) -> Requests:
        """What its metrics count; raises UserError where it does not answer."""
        return Requests.counted(self._ask("GET", "/metrics").text)

    def latency(self) -> float:
        """Median seconds that a client waits for a short answer to the rollout's probe.

        Raises:
            UserError: it does not answer.
        """
        probe = {"prompt": PROBE, "max_tokens": TIMED_TOKENS}
        waited = []
        for _ in range(TIMED_ANSWERS):
            start = time.perf_counter()
            self._ask("POST", "/predict", {"instances": [probe]})
            waited.append(time.perf_counter() - start)
        return statistics.median(waited)

    def deviations(self, documents: Sequence[JudgedDocument]) -> list[str]:
        """How its bits differ from the evaluation's on documents that judged its version, in words.

        Empty if they agree as far as the weights' format allows, or if nothing can be compared.

        Raises:
            UserError: it does not answer.
        """
        # During a rollout, an answer may come from either version, so nothing can be compared.
        route = next((entry for entry in self._status.routes if entry.share == 1), None)
        fitting = [candidate for candidate in documents if all(map(self._takes, candidate.windows))]
        if route is None or route.comparison is None or not fitting:
            return []
        bits: list[float] = []
        for document in fitting:
            # A slow endpoint is compared on as many documents as there is time for, at least one.
            if bits and time.monotonic() > self._end:
                break
            bits.append(sum(map(self._bits, document.windows)))
        result = compared(fitting[: len(bits)], bits, route.comparison.weights)
        return [] if result.fits else [f"Its bits are not those it was judged by: {result}."]

    def _takes(self, tokens: list[int]) -> bool:
        """Whether a window is within the endpoint's limits on the size of a request."""
        limits, size = self._status.settings, len(json.dumps(_scoring(tokens)))
        return len(tokens) <= limits.max_prompt_tokens and size <= limits.max_body_bytes

    def _bits(self, tokens: list[int]) -> float:
        """How many bits it gives a stretch of text, without the first token."""
        answer = self._ask("POST", "/v1/completions", _scoring(tokens)).json()
        # Nothing predicts the first token.
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
        return -sum(logprobs) / math.log(2)

    def _ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        deadline = min(time.monotonic() + min(BUSY_SECONDS, self._seconds), self._end)
        try:
            while True:
                remaining = max(LEAST_SECONDS, self._end - time.monotonic())
                timeout = min(self._seconds, remaining)
                answer = self._http.request(method, path, json=body, timeout=timeout)
                is_busy = answer.status_code == httpx.codes.TOO_MANY_REQUESTS
                if not is_busy or time.monotonic() > deadline:
                    return answer.raise_for_status()
                time.sleep(RETRY_SECONDS)
        except httpx.HTTPError as error:
            raise UserError(
                f"The endpoint at {self._status.url} does not answer {path}: {error}. Its log, "
                "`endpoint.log` in its folder of the store, says more."
            ) from error


def _scoring(tokens: list[int]) -> dict[str, Any]:
    """A request for the log-probabilities of these tokens that generates none."""
    return {"prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 0}


# Held-out text is measured again by engines if what serves differs from what the evaluation
# measured. Quantized weights are different weights, so the gate gets the scores of candidate and
# incumbent with them, both in the format of `endpoint.weights`: the incumbent, too, will serve in
# that format once the settings apply.
FINGERPRINT_KEY = "evaluation_fingerprint"


def quantized(settings: PipelineSettings) -> Weights | None:
    """The format that weights are quantized to where they serve; None where they serve as trained,
    as on Google Cloud."""
    weights = settings.endpoint.weights
    return weights if settings.platform == "local" and weights in QUANTIZED else None


def check_engine(settings: PipelineSettings, model: Path, report: Report) -> None:
    """Raise UserError where no engine quantizes models like this one, before one is trained.

    The model is the one that training starts from: what will be served has the same architecture.
    """
    if (weights := quantized(settings)) is None:
        return
    report(f"trying whether an engine runs this model in {weights}")
    begun = ModelSource(path=str(model), fingerprint="base")
    with tempfile.TemporaryDirectory() as folder:
        # Without documents: whether the engine converts the model and starts is all that is asked.
        asyncio.run(_measure(begun, "base model", [], settings, Path(folder)))


def measure_as_served(
    settings: PipelineSettings, spec: EvaluationSpec, report: Report
) -> dict[str, Any]:
    """Add the task `held_out_served` to an evaluation, where weights are quantized: its held-out
    documents, scored by engines.

    Args:
        spec: of an evaluation that is written, of a candidate and an incumbent.

    Returns:
        What is new of its result: the format as `served_weights`, and another fingerprint. Nothing
        where not every model was measured, or not in bits.

    Raises:
        UserError: no engine runs a model in this format, or one ended early.
    """
    if (weights := quantized(settings)) is None:
        return {}
    folder = Path(spec.output)
    result: dict[str, Any] = json.loads((folder / RESULT_NAME).read_text())
    if result["faults"] or not result["metric"]["is_bits"]:
        return {}
    scores = pq.read_table(folder / SCORES_NAME)
    rows = held_out_scores(scores)
    documents = read_judged(rows, Path(spec.shards), spec.shard_stats)
    bits_by_weights: dict[str, list[float]] = {}
    for role, source in (("candidate", spec.candidate), ("incumbent", spec.incumbent)):
        assert source is not None, "the registry always has one"
        if source.fingerprint not in bits_by_weights:
            report(f"{role}: measuring {len(documents)} documents in {weights}")
            bits = _measure(source, role, documents, settings, folder)
            bits_by_weights[source.fingerprint] = asyncio.run(bits)
        place = rows.column_names.index(f"score_{role}")
        rows = rows.set_column(
            place, f"score_{role}", pa.array(bits_by_weights[source.fingerprint])
        )
    # A fingerprint of its own, since the scores are now those of an evaluation in this format.
    fingerprint = hash_json({"before": result[FINGERPRINT_KEY], "in": weights})
    # The base model does not serve, so it has no such scores.
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    columns |= {"task": [SERVED_TASK] * len(rows), "score_base": [None] * len(rows)}
    together = pa.concat_tables([scores, pa.table(columns, schema=rows.schema)])
    together = together.replace_schema_metadata({FINGERPRINT_KEY: fingerprint})
    pq.write_table(together, folder / SCORES_NAME)
    served = {"served_weights": weights, FINGERPRINT_KEY: fingerprint}
    (folder / RESULT_NAME).write_text(json.dumps(result | served, indent=1))
    return served


async def _measure(
    source: ModelSource,
    role: str,
    documents: Sequence[JudgedDocument],
    settings: PipelineSettings,
    folder: Path,
) -> list[float]:
    """Bits of each document as an engine finds them; raises UserError."""
    desired = Desired(
        model_folder=Path(source.path),
        version=role,
        fingerprint=source.fingerprint,
        settings=settings.endpoint,
        # Where the endpoint will look for them, too.
        conversions=conversions_folder(Store(settings.store)),
    )
    engine = EngineProcess(desired, folder / f"engine-{role}.log")
    try:
        await engine.start()
        return [await bits_of(engine, document) for document in documents]
    except (EngineLost, Refused) as error:
        raise UserError(
            f"The {role} could not be measured as it would serve, in {settings.endpoint.weights}: "
            f"{error}."
        ) from error
    finally:
        await engine.stop()


NOT_COMPARED = "not compared: the store has no evaluation of it on plain text"
UNCHECKED = (
    "not compared, as `endpoint.engine.unchecked` accepts: its engine gives no log-probabilities "
    "of prompts"
)


class LiveAddress(BaseModel):
    """An endpoint that answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    predict_url: str
    """Where `{"instances": [...]}` is answered."""
    authorization: str = ""
    """The header that a request needs, as a shell line has it; empty where none is needed."""
    changed: bool
    """Whether this call changed what is served."""
    engine: str = ""
    """Which one computes, and why that one, as far as is known."""
    compared: str = ""
    """Its bits beside the evaluation's, in words."""
    instead_of: int | None = None
    """The version that is wanted and cannot be served, where another serves in its place."""


class ServingPlatform(ConfigurableResource, ABC):
    """Moves an endpoint to a model version."""

    @abstractmethod
    def serve(
        self,
        settings: PipelineSettings,
        version: ModelVersion,
        report: Report,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> LiveAddress:
        """Have a version served, and return once it is; a version that is served stays as it is.

        Args:
            still_wanted: asked when it is this call's turn to change the endpoint, and again and
                again until the version has all traffic.

        Raises:
            NoLongerWanted: it is no longer wanted; the endpoint is free for the version that is.
            RolloutFailed: the version that served before still does.
        """

    def latency(self, settings: PipelineSettings, report: Report) -> float | None:
        """Seconds that a client waits for a short answer; None where that is not measured."""
        return None

    @abstractmethod
    def serves(self, settings: PipelineSettings) -> bool:
        """Whether any version serves now."""

    @abstractmethod
    def stop(self, settings: PipelineSettings) -> bool:
        """End the endpoint; returns whether there was one."""


class LocalServingPlatform(ServingPlatform):
    """A server on this machine, which stays up after the run."""

    def serve(
        self,
        settings: PipelineSettings,
        version: ModelVersion,
        report: Report,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> LiveAddress:
        documents = judged_documents(Store(settings.store), version)
        desired = model_to_serve(settings, version).model_copy(update={"judged": documents})
        endpoint = process.start(endpoint_folder(settings), desired, report, still_wanted)
        comparison, url = endpoint.route.comparison, endpoint.status.url
        variable = settings.endpoint.token_variable
        return LiveAddress(
            url=url,
            predict_url=f"{url}/predict",
            # The shell fills in the token.
            authorization=f'"Authorization: Bearer ${variable}"' if variable else "",
            changed=endpoint.changed,
            engine=endpoint.route.engine,
            compared=str(comparison or (UNCHECKED if desired.judged else NOT_COMPARED)),
        )

    def latency(self, settings: PipelineSettings, report: Report) -> float | None:
        status = endpoint_status(settings)
        if status is None:
            return None
        try:
            with LiveEndpoint(status) as live:
                return live.latency()
        except UserError as error:
            report(f"the latency was not measured: {error}")
            return None

    def serves(self, settings: PipelineSettings) -> bool:
        status = endpoint_status(settings)
        return status is not None and bool(status.routes)

    def stop(self, settings: PipelineSettings) -> bool:
        return process.stop(endpoint_folder(settings))
