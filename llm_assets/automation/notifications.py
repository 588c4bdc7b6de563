"""Tells people what happened: by a webhook in Slack's form, and by e-mail. Each thing once.

A sensor looks whether what serves is as good as it was when it was judged.
"""

import json
import os
import smtplib
import ssl
from collections.abc import Callable
from email.message import EmailMessage
from functools import partial

import dagster as dg
import httpx

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.store.store import Store, layout
from llm_assets.assets.stage import failure_reason
from llm_assets.automation.decision import Wait
from llm_assets.automation.jobs import CLEANING, ROLLBACK
from llm_assets.automation.launched import Runs
from llm_assets.config import PipelineSettings
from llm_assets.history import NOTIFYING
from llm_assets.operation_settings import EmailSettings, NotificationSettings
from llm_assets.pipeline import PipelineResource

MOST_READ = 100
"""Of the newest events of an asset."""
SECONDS = 10.0
ENCRYPTED, STARTTLS = 465, 587


def build_notifications(settings: PipelineSettings) -> list[dg.SensorDefinition]:
    """Sensors that tell of failed and of ended runs; none where nobody is to be told.

    Where a message can be sent in no way the tick fails, and the next one sends it: Dagster's
    cursor moves on only after it.
    """
    if not settings.notifications.is_on:
        return []
    # Of several runs in a tick, Dagster forgets those before one whose message cannot be sent, and
    # they would be told again and again. It is read at each tick, in the process that loads this.
    os.environ.setdefault("DAGSTER_RUN_STATUS_SENSOR_PROCESS_LIMIT", "1")
    of_failed, of_verdicts = NOTIFYING
    told = "Sends a message when a run has failed, as `notifications` says."
    judged = "Sends a message with the gate's verdict when a run has built one, as `notifications` "
    return [
        _status_sensor(settings, dg.DagsterRunStatus.FAILURE, of_failed, told, _failure),
        _status_sensor(
            settings, dg.DagsterRunStatus.SUCCESS, of_verdicts, f"{judged}says.", _verdict
        ),
    ]


def _status_sensor(
    settings: PipelineSettings,
    status: dg.DagsterRunStatus,
    name: str,
    description: str,
    describe: Callable[[dg.RunStatusSensorContext], str | None],
) -> dg.SensorDefinition:
    # These have no tag of the pipeline's, since runs that train do not wait for them. What the
    # observation cannot read is told once, by `source_text_changed`.
    own_jobs = {settings.dagster_name(job) for job in (CLEANING, ROLLBACK)}

    @dg.run_status_sensor(
        run_status=status,
        name=settings.dagster_name(name),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=description,
    )
    def tell_of_run(context: dg.RunStatusSensorContext) -> None:
        run = context.dagster_run
        is_ours = run.job_name in own_jobs or Runs(context.instance, settings).is_ours(run)
        if is_ours and (text := describe(context)):
            try:
                send(settings.notifications, f"{settings.name}: {text}", context.log.warning)
            except UserError as error:
                # After any other error Dagster moves its cursor on, and the message is never sent.
                raise dg.DagsterError(str(error)) from None

    return tell_of_run


def _failure(context: dg.RunStatusSensorContext) -> str:
    """What failed, and the verdict that the run made before, which no other run tells."""
    run = context.dagster_run
    events = context.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    failed = [event.dagster_event for event in events if event.dagster_event]
    reasons = [f"{one.step_key}: {failure_reason(one.step_failure_data)}" for one in failed]
    reasons = reasons or [context.dagster_event.message or ""]
    verdict = _verdict(context)
    reasons += [f"Before that: {verdict}"] * bool(verdict)
    return f"run {run.run_id[:8]} ({run.job_name}) failed. " + " ".join(reasons)


def _verdict(context: dg.RunStatusSensorContext) -> str | None:
    """The gate's verdict, where the run made one, or was the first to register it."""
    run = context.dagster_run
    events = context.instance.all_logs(
        run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION
    )
    for event in events:
        made = event.asset_materialization
        if made is None or made.asset_key.path[-1] != "model_version":
            continue
        told = {name: value.value for name, value in made.metadata.items()}
        if told.get("made_now") or _is_first(context, event):
            return f"{told['summary']}. {told['reasons']}"
    return None


def _is_first(context: dg.RunStatusSensorContext, event: dg.EventLogEntry) -> bool:
    """Whether no run before came so far with this verdict: one that failed while it entered the
    verdict in the registry has made it, and told of nothing."""
    made = event.asset_materialization
    assert made is not None
    before = dg.AssetRecordsFilter(made.asset_key, before_timestamp=event.timestamp)
    earlier = context.instance.fetch_materializations(before, MOST_READ).records
    known = [one.asset_materialization.metadata for one in earlier if one.asset_materialization]
    return all(one.get("fingerprint") != made.metadata.get("fingerprint") for one in known)


def conclude(
    context: dg.SensorEvaluationContext,
    pipeline: PipelineResource,
    topic: str,
    found: dg.RunRequest | Wait,
    cursor: str | None = None,
) -> dg.SensorResult:
    """The result of a tick, which tells once of what waits for a person (`tell_once`)."""
    alarm = found.reason if isinstance(found, Wait) and found.is_alarm else None
    tell_once(pipeline.settings, pipeline.store, topic, alarm, context.log.warning)
    return tick_result(found, cursor)


def tick_result(found: dg.RunRequest | Wait, cursor: str | None) -> dg.SensorResult:
    """The run that a tick asks for, or why it asks for none."""
    if isinstance(found, Wait):
        return dg.SensorResult(skip_reason=found.reason, cursor=cursor)
    return dg.SensorResult(run_requests=[found], cursor=cursor)


def tell_once(
    settings: PipelineSettings,
    store: Store,
    topic: str,
    text: str | None,
    report: Report,
    state: str | None = None,
) -> None:
    """Tell of a state that lasts, such as a source that cannot be read, once until it changes.

    Where a message can be sent in no way that is reported, and the next call tries again.

    Args:
        topic: what the state is of.
        text: the state in words; None when all is well again.
        state: what of it makes it another one; all the text where it is None.
    """
    if not settings.notifications.is_on:
        return
    path = f"{layout.automation(settings.name)}/told.json"
    told = _read_told(store.read_bytes(path))
    now = None if text is None else state or text
    if told.get(topic) == now:
        return
    if text is not None:
        try:
            send(settings.notifications, f"{settings.name}: {text}", report)
        except UserError as error:
            report(str(error))
            return

    def remember(before: bytes | None) -> bytes:
        # As it is by now: another sensor may have told of its own topic meanwhile.
        others = {of: one for of, one in _read_told(before).items() if of != topic}
        return json.dumps(others if now is None else others | {topic: now}).encode()

    store.update(path, remember)


def _read_told(content: bytes | None) -> dict[str, str]:
    """Topic to its state that was told; none where that cannot be read, and it is told again."""
    try:
        return dict(json.loads(content or b"{}"))
    except (ValueError, TypeError):
        return {}


def send(settings: NotificationSettings, text: str, report: Report) -> None:
    """Send one message every way that is set; raises UserError where none works.

    Where one of two works, the other is reported: sent again, the message would come twice.
    """
    ways: list[Callable[[], None]] = []
    if settings.webhook_variable:
        ways.append(partial(_post, settings.webhook_variable, text))
    if settings.email:
        ways.append(partial(_mail, settings.email, text))
    faults = []
    for way in ways:
        try:
            way()
        except UserError as error:
            faults.append(str(error))
    if len(faults) == len(ways):
        raise UserError("\n".join(faults))
    for fault in faults:
        report(fault)


def _post(variable: str, text: str) -> None:
    address = _secret(variable, "notifications.webhook_variable")
    try:
        httpx.post(address, json={"text": text}, timeout=SECONDS).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # The address is a secret, and errors of httpx name it.
        raise UserError(
            f"The webhook in {variable} did not accept the message "
            f"({type(error).__name__}). Check the address, and that it can be reached."
        ) from None


def _mail(settings: EmailSettings, text: str) -> None:
    message = EmailMessage()
    message["Subject"] = text.splitlines()[0][:120]
    message["From"], message["To"] = settings.sender, ", ".join(settings.to)
    message.set_content(text)
    # By smtplib's own, any certificate of any name would do.
    context = ssl.create_default_context()
    encrypted = partial(smtplib.SMTP_SSL, context=context)
    connect = encrypted if settings.port == ENCRYPTED else smtplib.SMTP
    try:
        with connect(settings.host, settings.port, timeout=SECONDS) as server:
            if settings.port == STARTTLS:
                server.starttls(context=context)
            if settings.password_variable:
                password = _secret(settings.password_variable, "notifications.email")
                if not password.isascii():
                    raise UserError(
                        f"The password in {settings.password_variable} has characters beyond "
                        "ASCII, which Python cannot log in with. Choose another one."
                    )
                server.login(settings.sender, password)
            server.send_message(message)
    except (OSError, smtplib.SMTPException) as error:
        raise UserError(
            f"The mail server {settings.host}:{settings.port} did not accept the message "
            f"({error}). Check `notifications.email`."
        ) from error


def _secret(variable: str, key: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise UserError(f"`{key}` names {variable}, which is not set where Dagster runs.")
    return value
