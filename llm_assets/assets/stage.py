"""A stage of the graph as one record, from which its Dagster asset and its checks derive.

A stage is a function, decorated with `stage`, that says what it will make. Its parameters say what
it takes: `settings` is its section of the pipeline file, an `Artifact` is the current one of the
stage of that name, `identity` covers all of these, and the rest is Dagster's (`context`, `config`,
resources). It returns a `BuildPlan`.
"""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import dagster as dg
import pyarrow as pa

from artifacts.errors import DamagedArtifact, UserError, shown_in_line
from artifacts.program.lifetime import use_own_temporary_folder
from artifacts.reasons import reason_of
from artifacts.settings import Settings, value_at
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft
from llm_assets.assets.figures import Picture
from llm_assets.config import PipelineSettings
from llm_assets.launchpad import config_fields, overrides
from llm_assets.pipeline import Compare, PipelineResource

INTERRUPTIONS = ("DagsterExecutionInterruptedError", "KeyboardInterrupt")
BUCKETS = "https://console.cloud.google.com/storage/browser"
OBJECTS = "https://storage.cloud.google.com"
INPUT_TAG = "dagster/input_data_version"
CHANGED = "changed_for_this_run"
IO_MANAGER = "io_manager"
"""Name of the resource that gives an artifact to an asset of somebody else's as its input."""
ATTEMPTS = 3
"""Times that a stage is planned whose inputs change while it is built."""
_MARKDOWN = re.compile(r"[\\`*\[\]|!#~]|(?<!\w)_|_(?!\w)")
"""Characters by which Markdown formats, links or ends a cell; not the `_` within a name."""
Metadata = Mapping[str, Any]
"""What people see of an artifact, by names: `summary` is its line on the terminal."""
Check = Callable[..., dg.AssetCheckResult]
"""Its parameters are as a stage's."""


@dataclass(frozen=True)
class BuildPlan:
    """What one run of a stage will make, and how."""

    identity: Identity
    """What decides the artifact: the stage's identity, extended by what is known only now."""
    build: Callable[[Draft], None]
    """Writes the artifact and enters its figures in `draft.stats`; not called if it exists. The
    stage's inputs are compared with their checksums before."""
    compare: Compare | None = None
    """Rebuilds a sample with the libraries installed now; see `PipelineResource.find`."""
    finish: Callable[[Artifact], Metadata | None] = lambda artifact: None
    """What each run does once the artifact exists; returns metadata that no manifest holds."""
    outside: Mapping[dg.AssetKey, str] = field(default_factory=dict)
    """Data versions of outside assets that were read: Dagster looked them up too early."""


@dataclass(frozen=True)
class Stage:
    """One asset of the graph."""

    plan: Callable[..., BuildPlan | dg.MaterializeResult]
    """Its name is the asset's, its docstring the UI's description. It returns the result itself if
    there is nothing to build."""
    code_version: str
    """To be raised if the same input gives another output than before."""
    group: str
    kinds: set[str]
    pool: str | None = None
    """Dagster's pool, which limits how many runs build at the same time (dagster.yaml)."""
    view: Callable[[Artifact], Metadata] = lambda artifact: {}
    """What people see of an artifact."""
    checks: Sequence[Check] = ()
    blocking_checks: Sequence[Check] = ()
    """If one of these fails, nothing downstream is built in the same run."""
    columns: pa.Schema | None = None
    """Of its table, for the UI."""
    planned_again_on: type[Exception] | tuple[()] = ()
    """What `build` raises where what was planned from has changed since."""
    outside: Callable[[PipelineSettings], Sequence[dg.AssetKey]] = lambda settings: ()
    """Assets that it reads and nobody here makes."""

    @property
    def name(self) -> str:
        return self.plan.__name__

    def section(self, settings: PipelineSettings) -> Settings | None:
        """Its settings; None where it takes none."""
        # Also for a stage without a parameter `settings`, such as `eval_metrics`: the section is
        # part of what identifies its artifact.
        if self.name in type(settings).model_fields:
            section: Settings | None = getattr(settings, self.name)
            return section
        parameter = inspect.signature(self.plan).parameters.get("settings")
        return settings.stage(self.name, parameter.annotation) if parameter else None

    def asset(self, settings: PipelineSettings) -> dg.AssetsDefinition:
        """The Dagster asset."""

        def run(context: dg.AssetExecutionContext, **given: Any) -> dg.MaterializeResult:
            options = context.op_execution_context.op_config
            return self.materialize(given | {"context": context}, options)

        section, options = self.section(settings), _run_options(self.plan)
        inputs = [name for name in _inputs(self.plan) if not settings.leaves_out(name)]
        define = dg.asset(
            key=asset_key(settings, self.name),
            config_schema={
                **(config_fields(section, self.name) if section else {}),
                **(options.to_fields_dict() if options else {}),
            },
            # Not `ins`, which Dagster would load: a stage finds in the record what is current.
            deps=[*(asset_key(settings, name) for name in inputs), *self.outside(settings)],
            code_version=self.code_version,
            io_manager_key=settings.resource_key(IO_MANAGER),
            description=inspect.getdoc(self.plan),
            group_name=self.group,
            kinds=self.kinds,
            pool=self.pool,
        )
        own_parameters = {"context": dg.AssetExecutionContext, "pipeline": PipelineResource}
        return define(_for_dagster(settings, run, self.plan, own_parameters))

    def materialize(
        self, given: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dg.MaterializeResult:
        """Make what is current in a pipeline, in the step of a Dagster run.

        Args:
            given: `context`, `pipeline` and the resources that the plan takes.
            options: what the run's config has beside the settings.

        Raises:
            UserError: what it reads changes all the time, or one of the plan's own.
        """
        # What a killed step leaves in it, the next step removes.
        use_own_temporary_folder()
        # A second pipeline file with the same name and store is refused before anything is built.
        given["pipeline"].claim()
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                return self._materialize(given, options)
            except self.planned_again_on as error:
                if not attempts_left:
                    raise UserError(
                        f"Each of {ATTEMPTS} times, {error}. Materialize `{self.name}` "
                        "when nothing writes there, or point the source at a copy."
                    ) from error
                given["context"].log.info(f"{error}; reading it again")
        raise AssertionError("the last attempt returns or raises")

    def _materialize(
        self, given: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dg.MaterializeResult:
        pipeline: PipelineResource = given["pipeline"]
        settings = self.section(pipeline.settings)
        current = _current(self.plan, pipeline, self.name)
        inputs = {name: artifact for name, artifact in current.items() if artifact}
        identity = Identity(
            kind=self.name,
            code_version=self.code_version,
            settings=settings.content() if settings else {},
            inputs={name: artifact.fingerprint for name, artifact in inputs.items()},
        )
        own_arguments: dict[str, Any] = {"settings": settings, "identity": identity}
        if of_run := _run_options(self.plan):
            # The run's config also has settings, which the pipeline has put into its section.
            values = {name: options[name] for name in of_run.model_fields if name in options}
            own_arguments["config"] = of_run(**values)
        plan = _call(self.plan, {**given, **current, **own_arguments})
        if isinstance(plan, dg.MaterializeResult):
            return plan

        def build(draft: Draft) -> None:
            # A run that finds the artifact made reads no file of its inputs, so it verifies none.
            for artifact in inputs.values():
                artifact.verify()
            plan.build(draft)

        artifact = pipeline.make(given["context"], plan.identity, build, plan.compare)
        done = dict(plan.finish(artifact) or {})
        tags = {
            f"{INPUT_TAG}/{key.to_user_string()}": version for key, version in plan.outside.items()
        }
        # The manifest has the settings of the run alone, and not that they differ from the file's.
        if changed := self._changed(pipeline, settings):
            done[CHANGED] = table(["setting", "this run", "the file"], changed)
        return materialization(artifact, {**self.view(artifact), **done}, tags)

    def _changed(
        self, pipeline: PipelineResource, settings: Settings | None
    ) -> list[Sequence[str]]:
        """Each setting that the run's config overrides, with its value and the pipeline file's."""
        by_file = self.section(pipeline.settings_of_file)
        if settings is None or by_file is None or settings == by_file:
            return []
        changed = overrides(by_file, settings.model_dump(mode="json"), self.name)
        in_file = {self.name: by_file.model_dump(mode="json")}
        return [(key, str(value), str(value_at(in_file, key))) for key, value in changed.items()]

    def asset_checks(self, settings: PipelineSettings) -> Iterator[dg.AssetsDefinition]:
        """Its checks, each of what is current."""
        for check in (*self.blocking_checks, *self.checks):
            # As a default the check is bound now; a closure would see the loop's last one.
            def run(check: Check = check, **given: Any) -> dg.AssetCheckResult:
                return _call(check, given | _current(check, given["pipeline"]))

            yield dg.asset_check(
                asset=asset_key(settings, self.name),
                name=check.__name__,
                description=inspect.getdoc(check),
                blocking=check in self.blocking_checks,
            )(_for_dagster(settings, run, check, {"pipeline": PipelineResource}))


def stage(**fields: Any) -> Callable[[Callable[..., BuildPlan | dg.MaterializeResult]], Stage]:
    """Make a function the `plan` of a `Stage`, whose other fields are given."""
    return lambda plan: Stage(plan, **fields)


def _inputs(function: Callable[..., Any]) -> list[str]:
    """The stages whose artifacts a function takes."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if Artifact in (p.annotation, *get_args(p.annotation))]


def _current(
    function: Callable[..., Any], pipeline: PipelineResource, needed_by: str | None = None
) -> dict[str, Artifact | None]:
    """The current artifacts that a function takes; None of a stage that the graph is without."""
    settings, record = pipeline.settings, pipeline.record
    return {
        name: None if settings.leaves_out(name) else record.current(name, needed_by)
        for name in _inputs(function)
    }


def _run_options(function: Callable[..., Any]) -> type[dg.Config] | None:
    """What a function takes of the run's config beside its settings."""
    parameter = inspect.signature(function).parameters.get("config")
    return parameter.annotation if parameter else None


def _call(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    return function(**{name: values[name] for name in inspect.signature(function).parameters})


def _for_dagster(
    settings: PipelineSettings,
    run: Callable[..., Any],
    function: Callable[..., Any],
    own_parameters: Mapping[str, type],
) -> Callable[..., Any]:
    """`run` as Dagster sees it: it takes these, and of what the function takes, Dagster's; its
    foreseeable faults end the step with their message alone."""

    def guarded(*given: Any, **named: Any) -> Any:
        with user_faults(named["pipeline"]):
            return run(*given, **named)

    ours = {"settings", "identity", "config", *_inputs(function), *own_parameters}
    theirs = [p for p in inspect.signature(function).parameters.values() if p.name not in ours]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = [
        inspect.Parameter(name, kind, annotation=annotation)
        for name, annotation in own_parameters.items()
    ]
    guarded.__name__ = function.__name__
    _describe(guarded, inspect.Signature([*first, *theirs]))
    return own_resources(settings)(guarded)


def own_resources(settings: PipelineSettings) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have Dagster give a function its resources by the keys that they have in this pipeline."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        names = {
            settings.resource_key(name): name
            for name, parameter in signature.parameters.items()
            if inspect.isclass(parameter.annotation)
            and issubclass(parameter.annotation, dg.ConfigurableResource)
        }
        keys = {name: key for key, name in names.items()}

        @functools.wraps(function)
        def called(*given: Any, **named: Any) -> Any:
            return function(*given, **{names.get(key, key): value for key, value in named.items()})

        parameters = [
            parameter.replace(name=keys.get(name, name))
            for name, parameter in signature.parameters.items()
        ]
        # Dagster stores what is returned, unless that is None; of what yields it knows the results.
        returned = None if signature.return_annotation is None else inspect.Signature.empty
        _describe(called, inspect.Signature(parameters, return_annotation=returned))
        return called

    return decorate


def _describe(function: Callable[..., Any], signature: inspect.Signature) -> None:
    """Give a function a signature; Dagster reads the one or the other form, by its version."""
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {
        parameter.name: parameter.annotation for parameter in signature.parameters.values()
    }
    if signature.return_annotation is None:
        function.__annotations__["return"] = None


@contextmanager
def user_faults(pipeline: PipelineResource | None = None) -> Iterator[None]:
    """Turn an error with a known reason into a Dagster failure that states it and is never retried.

    Where an error names no file, the pipeline's store is what was written to.

    Such a failure carries no stack trace, which would bury the message and its advice. An unknown
    error keeps its trace.
    """
    # An earlier step in this process may have set it, and an unknown error would lose its trace.
    vars(sys).pop("tracebacklimit", None)
    try:
        yield
    except Exception as error:
        # A failure's own text says more than its cause: that a job goes on, and where to end it.
        if isinstance(error, dg.Failure) and error.description:
            raise
        # Which errors have a known reason, `reason_of` tells.
        store = pipeline.settings.store if pipeline and isinstance(error, OSError) else "."
        reason = reason_of(error, "." if "://" in store else store)
        if reason is None:
            raise
        sys.tracebacklimit = 0
        raise dg.Failure(description=reason, allow_retries=False) from None


def was_interrupted(failure: Any) -> bool:
    """Whether a step failed because somebody ended it, from its failure event's data."""
    return bool(failure.error and failure.error.cls_name in INTERRUPTIONS)


def failure_reason(failure: Any) -> str:
    """Why a step failed, from its failure event's data; Dagster's own error names only the step."""
    if failure.user_failure_data and failure.user_failure_data.description:
        return failure.user_failure_data.description
    error = failure.error
    if error is None:
        return "failed for an unknown reason"
    while error.cause or error.context:
        error = error.cause or error.context
    return str(error.message).strip()


def asset_key(settings: PipelineSettings, name: str) -> dg.AssetKey:
    """The key of one of the pipeline's assets."""
    return dg.AssetKey([settings.key_prefix, name] if settings.key_prefix else [name])


def check_files(artifact: Artifact) -> dg.AssetCheckResult:
    """Whether every file has the size and the checksum of the artifact's manifest."""
    try:
        artifact.verify()
    except DamagedArtifact as error:
        return dg.AssetCheckResult(passed=False, description=str(error))
    return dg.AssetCheckResult(passed=True, metadata={"files": len(artifact.manifest.files)})


def materialization(
    artifact: Artifact, metadata: Mapping[str, Any], tags: Mapping[str, str] | None = None
) -> dg.MaterializeResult:
    """The result of a stage: its fingerprint is the data version."""
    storage: dict[str, Any] = {
        "fingerprint": artifact.fingerprint,
        "folder": link(artifact.url),
        "bytes_stored": sum(entry.bytes for entry in artifact.manifest.files),
    }
    # The UI shows them in this order: what the stage reports before where the artifact lies.
    return dg.MaterializeResult(
        data_version=dg.DataVersion(artifact.fingerprint),
        metadata=readable(draw(metadata, artifact.store.cache)) | storage,
        tags=tags,
    )


def draw(metadata: Mapping[str, Any], cache: str) -> dict[str, Any]:
    """Metadata with its pictures drawn, or from the cache."""
    return {
        name: value.markdown(cache) if isinstance(value, Picture) else value
        for name, value in metadata.items()
    }


def readable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata whose figures have six digits; the manifest has them all."""
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in metadata.items()
    }


def link(url: str, shown_by: str = BUCKETS) -> dg.MetadataValue:
    """What lies in the store: a path to copy, or its address at Google, of a folder by default."""
    if url.startswith("gs://"):
        return dg.MetadataValue.url(f"{shown_by}/{url.removeprefix('gs://')}")
    return dg.MetadataValue.path(from_here(url))


def from_here(url: str) -> str:
    """A path within the project as its commands take it: a whole one is too long for the UI."""
    return url.removeprefix(f"{os.getcwd()}/")


def table(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> dg.MarkdownMetadataValue:
    """A table for the UI; `none` where it has no rows."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    filled = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return dg.MetadataValue.md("\n".join([*lines, *filled]) if filled else "none")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    # Text of several lines is set as one: more would end the table.
    words = " ".join(str(value).split())
    return f"{value:,}" if isinstance(value, int) else escape_markdown(words)


def escape_markdown(text: str) -> str:
    """Untrusted text as one line of Markdown that shows it and does nothing."""
    return _MARKDOWN.sub(r"\\\g<0>", shown_in_line(text)).replace("<", "&lt;").replace(">", "&gt;")
