"""Tells people what happened: by a webhook in Slack's form, and by e-mail. Each thing once.

A sensor checks whether the served version is still as good as when it was judged.
"""

import json
import os
import smtplib
import ssl
from base64 import b64encode
from collections.abc import Callable
from email.message import EmailMessage
from functools import partial

import dagster as dg
import httpx

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.store.store import Store, layout
from llm_assets.automation.decision import Wait
from llm_assets.automation.jobs import CLEANING, ROLLBACK
from llm_assets.automation.launched import Runs, why_failed
from llm_assets.config import PipelineSettings
from llm_assets.history import NOTIFYING
from llm_assets.operation_settings import EmailSettings, NotificationSettings
from llm_assets.pipeline import PipelineResource

MOST_READ = 100
"""Of the newest events of an asset."""
SECONDS = 10.0
ENCRYPTED, STARTTLS = 465, 587
# Dagster has no public names for these; tests compare them with Dagster's own.
WILL_RETRY_TAG, REASON_TAG = "dagster/will_retry", "dagster/failure_reason"
ENDED = "UNEXPECTED_TERMINATION"
"""The reason of a run that was told to end, and by nobody who canceled it."""
AUTHENTICATED = 235
"""A mail server's answer to a name and password that it accepts (RFC 4954)."""


def build_notifications(settings: PipelineSettings) -> list[dg.SensorDefinition]:
    """Sensors that report failed and finished runs; none if no notifications are configured.

    If a message cannot be sent in any way, the tick fails and the next one sends it: Dagster's
    cursor moves only after a tick that succeeds.
    """
    if not settings.notifications.is_on:
        return []
    # With several runs in a tick, a message that cannot be sent would make Dagster forget that
    # those before it were reported, and report them again. The variable is read by this process per
    # tick.
    os.environ.setdefault("DAGSTER_RUN_STATUS_SENSOR_PROCESS_LIMIT", "1")
    of_failed, of_verdicts = NOTIFYING
    failed, judged = "when a run has failed", "with the gate's verdict when a run has built one"
    return [
        _status_sensor(settings, dg.DagsterRunStatus.FAILURE, of_failed, failed, _failure),
        _status_sensor(settings, dg.DagsterRunStatus.SUCCESS, of_verdicts, judged, _verdict),
    ]


def _status_sensor(
    settings: PipelineSettings,
    status: dg.DagsterRunStatus,
    name: str,
    told: str,
    describe: Callable[[dg.RunStatusSensorContext], str | None],
) -> dg.SensorDefinition:
    # These two jobs have no tag of the pipeline, because runs that train do not wait for them. A
    # failed observation is left out: `source_text_changed` reports an unreadable source, once.
    own_jobs = {settings.dagster_name(job) for job in (CLEANING, ROLLBACK)}

    @dg.run_status_sensor(
        run_status=status,
        name=settings.dagster_name(name),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Sends a message {told}, as `notifications` says.",
    )
    def tell_of_run(context: dg.RunStatusSensorContext) -> None:
        run = context.dagster_run
        # Without `monitored_jobs`, Dagster calls a sensor for the runs of all jobs of its code
        # location.
        is_ours = run.job_name in own_jobs or Runs(context.instance, settings).is_ours(run)
        if is_ours and (text := describe(context)):
            try:
                send(settings.notifications, f"{settings.name}: {text}", context.log.warning)
            except UserError as error:
                # After any other error Dagster moves its cursor on, and the message is never sent.
                raise dg.DagsterError(str(error)) from None

    return tell_of_run


def _failure(context: dg.RunStatusSensorContext) -> str | None:
    """What failed, and the verdict that the run reached before, which no other run reports."""
    run = context.dagster_run
    reasons, verdict = [why_failed(context.instance, run.run_id)], _verdict(context)
    if run.tags.get(WILL_RETRY_TAG) == "true":
        # As by `llm-assets down`: the run that continues it tells how it ends.
        if run.tags.get(REASON_TAG) == ENDED:
            return verdict
        reasons.append("It is launched again from the step that did not end.")
    # The message about verdicts is for runs that succeed, and this one will not.
    reasons += [f"Before that: {verdict}"] * bool(verdict)
    return f"run {run.run_id[:8]} ({run.job_name}) failed. " + " ".join(reasons)


def _verdict(context: dg.RunStatusSensorContext) -> str | None:
    """The gate's verdict, where the run made one, or was the first to register it."""
    run = context.dagster_run
    events = context.instance.all_logs(
        run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION
    )
    for event in events:
        materialization = event.asset_materialization
        if materialization is None or materialization.asset_key.path[-1] != "model_version":
            continue
        metadata = {name: value.value for name, value in materialization.metadata.items()}
        if metadata.get("made_now") or _is_first(context, event):
            return f"{metadata['summary']}. {metadata['reasons']}"
    return None


def _is_first(context: dg.RunStatusSensorContext, event: dg.EventLogEntry) -> bool:
    """Whether this is the first run to get this far with the verdict. A run that failed while
    entering it in the registry has built it, but has reported nothing."""
    materialization = event.asset_materialization
    assert materialization is not None
    records_filter = dg.AssetRecordsFilter(
        materialization.asset_key, before_timestamp=event.timestamp
    )
    earlier = context.instance.fetch_materializations(records_filter, MOST_READ).records
    fingerprints = [
        record.asset_materialization.metadata.get("fingerprint")
        for record in earlier
        if record.asset_materialization
    ]
    return materialization.metadata.get("fingerprint") not in fingerprints


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
    """Report a lasting state, such as a source that cannot be read, once until it changes.

    If a message cannot be sent in any way, that is reported, and the next call tries again.

    Args:
        topic: what the state is of.
        text: the state in words; None when all is well again.
        state: what identifies the state; None for all of the text.
    """
    if not settings.notifications.is_on:
        return
    path = f"{layout.automation(settings.name)}/told.json"
    states = _read_topics(store.read_bytes(path))
    now = None if text is None else state or text
    if states.get(topic) == now:
        return
    if text is not None:
        try:
            send(settings.notifications, f"{settings.name}: {text}", report)
        except UserError as error:
            report(str(error))
            return

    def remember(content: bytes | None) -> bytes:
        # Read again: another sensor may have reported a topic of its own meanwhile.
        others = {of: one for of, one in _read_topics(content).items() if of != topic}
        return json.dumps(others if now is None else others | {topic: now}).encode()

    # It is noted only once it is sent: if this process is killed in between, people are told twice,
    # which is better than never.
    store.update(path, remember)


def _read_topics(content: bytes | None) -> dict[str, str]:
    """Topic to its state that was told; none where that cannot be read, and it is told again."""
    try:
        return dict(json.loads(content or b"{}"))
    except (ValueError, TypeError):
        return {}


def send(settings: NotificationSettings, text: str, report: Report) -> None:
    """Send one message every way that is set; raises UserError where none works.

    If only one of two ways fails, it is reported: a second try would send the message twice.
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
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        # The address is a secret, and errors of httpx name it. Python's own of a host with two dots
        # in a row, or more than 63 letters between them, is a UnicodeError.
        raise UserError(
            f"The webhook in {variable} did not accept the message "
            f"({type(error).__name__}). Check the address, and that it can be reached."
        ) from None


def _mail(settings: EmailSettings, text: str) -> None:
    message = EmailMessage()
    # A header is one line.
    message["Subject"] = text.splitlines()[0][:120]
    message["From"], message["To"] = settings.sender, ", ".join(settings.to)
    message.set_content(text)
    # smtplib's default context would accept any certificate, for any name.
    context = ssl.create_default_context()
    encrypted = partial(smtplib.SMTP_SSL, context=context)
    connect = encrypted if settings.port == ENCRYPTED else smtplib.SMTP
    try:
        with connect(settings.host, settings.port, timeout=SECONDS) as server:
            if settings.port == STARTTLS:
                server.starttls(context=context)
            if settings.password_variable:
                password = _secret(settings.password_variable, "notifications.email")
                _log_in(server, settings.sender, password)
            server.send_message(message)
    except (OSError, UnicodeError, smtplib.SMTPException) as error:
        raise UserError(
            f"The mail server {settings.host}:{settings.port} did not accept the message "
            f"({error}). Check `notifications.email`."
        ) from error


def _log_in(server: smtplib.SMTP, user: str, password: str) -> None:
    if f"{user}{password}".isascii():
        server.login(user, password)
        return
    # `login` encodes both in ASCII; this way of logging in is defined in UTF-8 (RFC 4616).
    server.ehlo_or_helo_if_needed()
    name_and_password = b64encode(f"\0{user}\0{password}".encode()).decode()
    code, answer = server.docmd("AUTH", f"PLAIN {name_and_password}")
    if code != AUTHENTICATED:
        raise smtplib.SMTPAuthenticationError(code, answer)


def _secret(variable: str, key: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise UserError(f"`{key}` names {variable}, which is not set where Dagster runs.")
    return value
