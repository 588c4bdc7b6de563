"""What people are told, by a real webhook and a real mail server of the tests' own."""

import json
import socketserver
import ssl
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import dagster
import pytest
from dagster import DagsterError, DagsterRunStatus, Failure, MaterializeResult, asset, materialize
from huggingface_hub import HfApi, get_session
from huggingface_hub.utils import hf_raise_for_status

from artifacts.errors import UserError
from artifacts.store import layout
from llm_assets.automation import notifications, sensors
from llm_assets.automation.jobs import CLEANING, ROLLBACK
from llm_assets.automation.launched import DIED, PIPELINE_TAG
from llm_assets.automation.notifications import send, tell_once
from llm_assets.config import load_settings
from llm_assets.gate.verdict import Outcome
from llm_assets.operation_settings import EmailSettings, NotificationSettings
from tests.llm_assets.automation.conftest import Automated
from tests.stand_ins.http_server import Answer, start_http_server
from tests.stand_ins.identity import make_certificates

VARIABLE = "TEST_WEBHOOK"
RIGHT = "\0a@example.org\0schlüssel"
"""What the mail server takes: a user and a password with a letter beyond ASCII."""


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a webhook has heard; its address is in the environment."""
    heard: list[str] = []

    def hear(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        heard.append(json.loads(body)["text"])
        return 200, [], b""

    server = start_http_server(hear)
    monkeypatch.setenv(VARIABLE, f"{server.url}/secret-path")
    yield heard
    server.stop()


@contextmanager
def down(host: str = "127.0.0.1:1") -> Iterator[None]:
    """Nothing listens at the webhook's address while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, f"http://{host}/secret-path")
        yield


@pytest.fixture
def automated(automated: Automated) -> Automated:
    """Its notifications go to the webhook."""
    automated.project.configure(notifications={"webhook_variable": VARIABLE})
    return automated


@pytest.fixture
def mailbox() -> Iterator[tuple[socketserver.ThreadingTCPServer, list[str]]]:
    """A mail server, and the lines that it was given."""
    lines: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 ready\r\n")
            in_message = False
            for raw in self.rfile:
                line = raw.decode().rstrip()
                lines.append(line)
                if in_message and line != ".":
                    continue
                in_message = line.upper() == "DATA"
                answer = {"DATA": b"354 go on", "QUIT": b"221 bye"}.get(line.upper(), b"250 yes")
                if line.startswith("AUTH"):
                    is_right = b64decode(line.split()[-1]).decode() == RIGHT
                    answer = b"235 welcome" if is_right else b"535 wrong password"
                self.wfile.write(answer + b"\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server, lines
        server.shutdown()


def test_source_that_cannot_be_read_is_told_once_until_it_can(
    automated: Automated, webhook: list[str]
) -> None:
    away = automated.text.with_name("away")
    automated.text.rename(away)
    for _ in range(2):
        with pytest.raises(Failure, match="matches no file"):
            automated.tick()
    assert len(webhook) == 1 and "manual: Source 'manual'" in webhook[0]
    away.rename(automated.text)
    assert "knows this text" in str(automated.tick())
    automated.text.rename(away)
    told = automated.project.folder / "store" / layout.automation("manual") / "told.json"
    for messages in (2, 3):
        with pytest.raises(Failure):
            automated.tick()
        assert len(webhook) == messages
        # What cannot be read says nothing of what was told.
        told.write_text(told.read_text()[:-1])


def test_a_source_of_the_hub_that_is_too_busy_is_told_once_and_why(
    automated: Automated, webhook: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        return 429, [("x-request-id", str(uuid4()))], b""

    hub = start_http_server(refuse)

    def ask(*_: object, **options: object) -> None:
        hf_raise_for_status(get_session().get(hub.url))

    monkeypatch.setattr(HfApi, "dataset_info", ask)
    automated.project.configure(
        raw_corpus={"sources": [{"name": "web", "type": "hugging_face", "dataset": "team/web"}]}
    )
    for _ in range(2):
        with pytest.raises(Failure, match="429 Too Many Requests"):
            automated.tick()
    hub.stop()
    assert len(webhook) == 1 and "429 Too Many Requests" in webhook[0]


def test_a_source_of_bigquery_that_fails_is_told_once_though_each_job_has_a_name(
    automated: Automated, webhook: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError(f"BigQuery refused.\n\nLocation: EU\nJob ID: {uuid4()}\n\nAsk for more.")

    monkeypatch.setattr(sensors, "look", fail)
    for _ in range(2):
        with pytest.raises(Failure, match="Job ID"):
            automated.tick()
    assert len(webhook) == 1 and "Job ID" in webhook[0]


def test_what_another_sensor_tells_meanwhile_is_remembered(
    automated: Automated, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    settings = load_settings(automated.project.config)
    tell = partial(tell_once, settings, automated.project.record.store, report=print)

    def hear(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        heard.append(json.loads(body)["text"])
        if len(heard) == 1:
            tell("second", "something else")
        return 200, [], b""

    server = start_http_server(hear)
    monkeypatch.setenv(VARIABLE, server.url)
    for topic, text in (
        ("first", "something"),
        ("first", "something"),
        ("second", "something else"),
    ):
        tell(topic, text)
    server.stop()
    assert [text.partition(": ")[2] for text in heard] == ["something", "something else"]


def test_spent_budget_is_told_once_and_a_blackout_which_ends_by_itself_is_not(
    automated: Automated, webhook: list[str]
) -> None:
    automated.automate(blackouts=["00:00-24:00"])
    automated.add()
    assert "blackout" in str(automated.tick()) and not webhook
    automated.automate(blackouts=[])
    automated.end(automated.launch(automated.tick()), succeeded=False)
    automated.automate(retry_minutes=0, monthly_hours=1e-9)
    automated.tick()
    automated.tick()
    assert len(webhook) == 1 and "budget is spent" in webhook[0]


@pytest.mark.parametrize("job", [CLEANING, ROLLBACK])
def test_failed_runs_of_jobs_that_train_nothing_are_told_too(
    automated: Automated, webhook: list[str], job: str
) -> None:
    automated.tick("failed_runs_are_told")
    automated.end(automated.run_job(job), succeeded=False)
    automated.tick("failed_runs_are_told")
    (told,) = webhook
    assert f"({job}) failed" in told


def test_a_killed_run_is_told_with_dagsters_reason_and_that_it_is_launched_again(
    automated: Automated, webhook: list[str]
) -> None:
    automated.tick("failed_runs_are_told")
    instance = automated.instance
    run = instance.get_run_by_id(automated.run_job(CLEANING))
    assert run is not None
    # As Dagster's own code reports the end of a run's process, and that it launches the run again.
    private = Path(dagster.__file__).parent
    assert f'f"{DIED}{{run.run_id}}"' in (private / "_grpc/server.py").read_text()
    tags = (private / "_core/storage/tags.py").read_text()
    assert 'WILL_RETRY_TAG = f"{SYSTEM_TAG_PREFIX}will_retry"' in tags
    reason = f"{DIED}{run.run_id} was terminated by signal 9 (SIGKILL)."
    instance.report_engine_event(f"[DagsterApiServer] {reason}", run)
    instance.add_run_tags(run.run_id, {notifications.WILL_RETRY_TAG: "true"})
    instance.report_run_failed(run)
    automated.tick("failed_runs_are_told")
    (told,) = webhook
    assert f"({CLEANING}) failed. {reason}" in told, "no reason that names nothing"
    assert told.endswith("It is launched again from the step that did not end.")
    # As `llm-assets down` ends one (tests/llm_assets/test_queue.py has Dagster do it).
    for will_retry in ("true", "false"):
        ended = instance.get_run_by_id(automated.run_job(CLEANING))
        assert ended is not None
        tags_of_ended = {notifications.REASON_TAG: notifications.ENDED}
        instance.add_run_tags(
            ended.run_id, tags_of_ended | {notifications.WILL_RETRY_TAG: will_retry}
        )
        instance.report_run_failed(ended)
        automated.tick("failed_runs_are_told")
        assert len(webhook) == (1 if will_retry == "true" else 2)


def test_of_several_failed_runs_none_is_told_again_where_one_cannot_be_told(
    automated: Automated, webhook: list[str]
) -> None:
    automated.tick("failed_runs_are_told")
    for _ in range(3):
        automated.end(automated.run_job(CLEANING), succeeded=False)
    automated.tick("failed_runs_are_told")
    for _ in range(2):
        with down(), pytest.raises(DagsterError, match="webhook"):
            automated.tick("failed_runs_are_told")
    for _ in range(4):
        automated.tick("failed_runs_are_told")
    assert len(webhook) == len(set(webhook)) == 3


def test_version_that_runs_cannot_serve_is_told_once_until_it_serves(
    automated: Automated, webhook: list[str]
) -> None:
    automated.automate(retries=1, retry_minutes=0)
    automated.teach("second")
    automated.registry.roll_back("Ada", "it rambles")
    for _ in range(2):
        assert not webhook
        automated.end(automated.launch(automated.tick("endpoint_follows")), succeeded=False)
    for _ in range(2):
        assert "2 runs did not resolve this" in str(automated.tick("endpoint_follows"))
    (told,) = webhook
    assert told.startswith("manual: Version 1 is wanted, but does not serve. 2 runs did not")
    automated.registry.confirm(1)
    assert "is wanted and serving" in str(automated.tick("endpoint_follows"))
    automated.registry.reject(1, "Ada", "it rambles too")
    automated.launch(automated.tick("endpoint_follows"), DagsterRunStatus.CANCELED)
    automated.tick("endpoint_follows")
    assert len(webhook) == 2 and "was canceled" in webhook[1]


def test_webhook_that_is_down_holds_no_launch_back(
    automated: Automated, webhook: list[str]
) -> None:
    automated.teach("second", Outcome.TOO_FEW_DOCUMENTS)
    automated.add()
    automated.teach("third", Outcome.TOO_FEW_DOCUMENTS)
    with down():
        assert "The gate rejected" in str(automated.tick()) and not webhook
    automated.tick()
    assert len(webhook) == 1 and "The gate rejected" in webhook[0]


def test_a_verdict_that_a_failed_run_could_not_register_is_told_by_the_run_that_does(
    automated: Automated, webhook: list[str]
) -> None:
    """It is found, not made, by that run; a later one that finds it again tells nothing."""

    def run(fingerprint: str, made_now: bool) -> None:
        told = {"summary": f"version {fingerprint} promoted", "reasons": "It is better."}

        @asset
        def model_version() -> MaterializeResult:
            found = {"made_now": made_now, "fingerprint": fingerprint}
            return MaterializeResult(metadata=told | found)

        tags = {PIPELINE_TAG: "manual"}
        assert materialize([model_version], instance=automated.instance, tags=tags).success
        automated.tick("verdicts_are_told")

    automated.cursor = None
    automated.tick("verdicts_are_told")
    for fingerprint, made_now in (("2", True), ("2", False), ("3", False), ("3", False)):
        run(fingerprint, made_now)
    assert webhook == [f"manual: version {number} promoted. It is better." for number in ("2", "3")]


def mail_settings(server: socketserver.ThreadingTCPServer) -> NotificationSettings:
    port = server.server_address[1]
    email = {"host": "127.0.0.1", "port": port, "sender": "a@example.org", "to": ["b@example.org"]}
    return NotificationSettings(email=EmailSettings.model_validate(email))


def test_mail_holds_the_message(mailbox: tuple[socketserver.ThreadingTCPServer, list[str]]) -> None:
    server, lines = mailbox
    send(mail_settings(server), "manual: version 3 promoted", print)
    assert "Subject: manual: version 3 promoted" in lines and "To: b@example.org" in lines


def test_a_mistyped_mail_server_is_named() -> None:
    email = {"host": "mail..example", "sender": "a@example.org", "to": ["b@example.org"]}
    with pytest.raises(UserError, match=r"mail server mail\.\.example:\d+ did not accept"):
        send(NotificationSettings(email=EmailSettings.model_validate(email)), "told", print)


def test_a_wrong_password_is_no_reason_to_tell_the_webhook_again_and_any_right_one_is_taken(
    mailbox: tuple[socketserver.ThreadingTCPServer, list[str]],
    webhook: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, lines = mailbox
    email = mail_settings(server).email
    assert email is not None
    guarded = email.model_copy(update={"password_variable": "MAIL_PASSWORD"})
    both = NotificationSettings(webhook_variable=VARIABLE, email=guarded)
    faults: list[str] = []
    monkeypatch.setenv("MAIL_PASSWORD", "schloß")
    send(both, "told", faults.append)
    assert webhook == ["told"] and "wrong password" in faults[0] and "From" not in str(lines)
    monkeypatch.setenv("MAIL_PASSWORD", RIGHT.split("\0")[-1])
    send(both, "told", faults.append)
    assert len(faults) == 1 and "Subject: told" in lines


def test_nothing_is_sent_to_a_mail_server_whose_certificate_nobody_vouches_for(
    mailbox: tuple[socketserver.ThreadingTCPServer, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, lines = mailbox
    issued = make_certificates()
    (tmp_path / "server.pem").write_bytes(issued.server + issued.server_key)
    (tmp_path / "authority.pem").write_bytes(issued.authority)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setattr(notifications, "ENCRYPTED", server.server_address[1])
    with pytest.raises(UserError, match=r"did not accept the message .*certificate verify failed"):
        send(mail_settings(server), "manual: version 3 promoted", print)
    assert not lines
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    send(mail_settings(server), "manual: version 3 promoted", print)
    assert "To: b@example.org" in lines


@pytest.mark.parametrize("host", ["127.0.0.1:1", "hooks..example", "[::1"])
def test_webhook_that_is_down_or_mistyped_is_named_without_its_address(host: str) -> None:
    with down(host), pytest.raises(UserError, match=VARIABLE) as refused:
        send(NotificationSettings(webhook_variable=VARIABLE), "anything", print)
    assert "secret-path" not in str(refused.value)
    with pytest.raises(UserError, match="is not set where Dagster runs"):
        send(NotificationSettings(webhook_variable=VARIABLE), "anything", print)
